"""Fixed-point functions of the sampling kernels against exact values, and products against float64's own."""

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from random import Random

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling.choice_math import gumbel, score
from kernels.sampling.fixed_point import exponential, part_of, powers_table
from kernels.sampling.noise import gumbel as exact_gumbel
from tests.kernels.on_device.devices import DEVICE

POINT = 40
TILE = 64
INF_BITS, NAN_BITS, NO_ID = 0x7F800000, 0x7FC00000, 0x7FFFFFFF


@triton.jit  # type: ignore[untyped-decorator]
def _exponential_kernel(bits_ptr: tl.tensor, out_ptr: tl.tensor, POINT: tl.constexpr, TILE: tl.constexpr) -> None:
    o_tile = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out_ptr + o_tile, exponential(tl.load(bits_ptr + o_tile), powers_table(), POINT))


@triton.jit  # type: ignore[untyped-decorator]
def _score_kernel(bits_ptr: tl.tensor, scaled_ptr: tl.tensor, out_ptr: tl.tensor) -> None:
    i_token = tl.program_id(0)
    tl.store(out_ptr + i_token, score(tl.load(bits_ptr + i_token), tl.load(scaled_ptr + i_token), powers_table()))


@triton.jit  # type: ignore[untyped-decorator]
def _gumbel_kernel(bits_ptr: tl.tensor, out_ptr: tl.tensor, TILE: tl.constexpr) -> None:
    o_tile = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out_ptr + o_tile, gumbel(tl.load(bits_ptr + o_tile)))


@triton.jit  # type: ignore[untyped-decorator]
def _part_kernel(total_ptr: tl.tensor, factor_ptr: tl.tensor, out_ptr: tl.tensor) -> None:
    i_case = tl.program_id(0)
    tl.store(out_ptr + i_case, part_of(tl.load(total_ptr + i_case), tl.load(factor_ptr + i_case)))


def exponentials(depths: Tensor) -> list[int]:
    bits = torch.zeros(triton.cdiv(len(depths), TILE) * TILE, dtype=torch.int32)
    bits[: len(depths)] = depths
    out = torch.empty(len(bits), dtype=torch.int64, device=DEVICE)
    _exponential_kernel[(len(bits) // TILE,)](bits.to(DEVICE), out, POINT=POINT, TILE=TILE)
    return out.tolist()[: len(depths)]


def scores(bits: Tensor, scaled: Tensor) -> list[int]:
    out = torch.empty(len(bits), dtype=torch.int64, device=DEVICE)
    _score_kernel[(len(bits),)](bits.to(DEVICE), scaled.to(DEVICE), out)
    return list(out.tolist())


def in_decimal(compute: Callable[[], Decimal]) -> Decimal:
    with localcontext() as context:
        context.prec = 50
        return compute()


def spread_depths() -> Tensor:
    """Bits of float32 of all sizes up to 32, those about 0, about whole powers of two, and where masses end."""
    random = Random(1)
    values = [random.uniform(0, 30) for _ in range(100)] + [2.0 ** random.uniform(-45, 5) for _ in range(100)]
    values += [n * math.log(2) for n in range(42)] + [i * math.log(2) / 64 for i in range(64)] + [28.4, 31.999, 1e-40]
    return torch.tensor(values).view(torch.int32)


def test_an_exponential_is_rounded_as_the_exact_one_is() -> None:
    depths = spread_depths()
    for found, depth in zip(exponentials(depths), depths.view(torch.float32).tolist(), strict=True):
        exact = in_decimal(lambda depth=depth: (-Decimal(depth)).exp() * 2**POINT)  # type: ignore[misc]
        assert abs(found - exact) <= Decimal("0.5") + Decimal(2) ** -11, depth


def test_an_exponential_is_one_at_zero_and_nothing_far_below() -> None:
    depths = [0, 0x42000000, INF_BITS, NAN_BITS, NO_ID]
    assert exponentials(torch.tensor(depths, dtype=torch.int32)) == [1 << POINT, 0, 0, 0, 0]


def spread_bits() -> Tensor:
    """Random bits, and those at both ends and where the series begins."""
    random = Random(2)
    edge = 2**31 - 2**28  # here u = 15/16
    bits = [random.randrange(-(2**31), 2**31) for _ in range(120)]
    bits += [
        sign * 2**31 - up + random.randrange(1 << n) for n in range(0, 28, 2) for sign, up in ((-1, 0), (1, 1 << n))
    ]
    return torch.tensor([*bits, -(2**31), 2**31 - 1, edge - 1, edge, edge + 1, -1, 0, 1], dtype=torch.int32)


def exact_score(bits: int, scaled: float) -> Decimal:
    uniform = Decimal(2 * (bits + 2**31) + 1) / 2**33
    return in_decimal(lambda: -(-uniform.ln()).ln() + Decimal(scaled))


def test_a_score_is_the_exact_one() -> None:
    bits = spread_bits()
    scaled = -torch.rand(len(bits), generator=torch.Generator().manual_seed(1)) * 20
    scaled[::3] = 0.0
    scaled[1::7] = -(2.0**-40)
    found = scores(bits, scaled)
    for index, (of_bits, of_scaled) in enumerate(zip(bits.tolist(), scaled.tolist(), strict=True)):
        error = Decimal(found[index]) / 2**56 - exact_score(of_bits, of_scaled)
        assert abs(error) < Decimal(2) ** -47, (of_bits, of_scaled)


def test_noise_in_float32_is_near_enough_to_leave_out_no_winner() -> None:
    bits = spread_bits()
    padded = torch.zeros(triton.cdiv(len(bits), TILE) * TILE, dtype=torch.int32)
    padded[: len(bits)] = bits
    out = torch.empty(len(padded), device=DEVICE)
    _gumbel_kernel[(len(padded) // TILE,)](padded.to(DEVICE), out, TILE=TILE)
    assert (out.cpu().double() - exact_gumbel(padded)).abs().max() < 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_a_part_is_the_one_of_float64(seed: int) -> None:
    random = Random(seed)
    totals = [random.randrange(1 << 40, 1 << random.randrange(41, 59)) for _ in range(60)]
    totals += [(1 << n) + random.randrange(-3, 4) for n in range(41, 59)]
    factors = [0.5, 0.1, 0.95, math.nextafter(1.0, 0.0), 1e-9, 5e-324, 1e-300, 0.75]
    cases = [(total, random.choice([*factors, random.random()])) for total in totals]
    for total in totals:  # factors whose product is a whole number, or nearly one
        factor = random.randrange(1, total) / total
        cases += [(total, each) for each in (factor, math.nextafter(factor, 0.0), math.nextafter(factor, 1.0))]
    cases = [(total, factor) for total, factor in cases if 0 < factor < 1]
    out = torch.empty(len(cases), dtype=torch.int64, device=DEVICE)
    factor_bits = torch.from_numpy(np.array([factor for _, factor in cases])).view(torch.int64)
    _part_kernel[(len(cases),)](torch.tensor([total for total, _ in cases]).to(DEVICE), factor_bits.to(DEVICE), out)
    assert out.tolist() == [math.ceil(float(total) * factor) for total, factor in cases]
