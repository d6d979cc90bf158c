"""Products with weights of 8 and 4 bits by kernel, against the torch references."""

import pytest
import torch
from torch import Tensor

from kernels.products import fp8_product, int4_matrix, int4_product, row_quantising
from kernels.products.int4_matrix import GROUP, Int4Matrix, quantise_groups
from kernels.products.int4_tiling import MOST_ROWS, arrival_counters, int4_tiling
from tests.kernels.on_device.devices import DEVICE, DTYPES, HAS_GPU, needs_e4m3
from tests.kernels.on_device.tolerance import assert_as_exact_as_torch

# A worker quantises numbers of each, and the quantisers are torch's: the interpreter has no part in them.
WEIGHT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
gpu_only = pytest.mark.skipif(not HAS_GPU, reason="only a GPU shows it")


def random(num_rows: int, size: int, seed: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)) * 0.7).to(DEVICE, dtype)


@needs_e4m3
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 17, 256, 1040])
def test_rows_become_the_references_numbers_bit_by_bit(size: int, dtype: torch.dtype) -> None:
    """Four rows have a number that is not finite: their scales are NaN."""
    wide = random(9, size + 3, seed=size, dtype=dtype)
    wide[:, size:] = torch.nan
    wide[1] *= 2.0**-30 if dtype != torch.float16 else 2.0**-12
    wide[2] = 0.0
    wide[3] *= 448.0 / wide[3, :size].abs().max()
    for row, number in ((4, torch.nan), (5, torch.inf), (6, -torch.inf)):
        wide[row, size // 2] = number
    wide[7, 0], wide[7, size - 1] = torch.inf, torch.nan
    x = wide[:, :size]
    codes, scales = row_quantising.quantise_rows(x)
    reference = fp8_product.quantise_rows(x)
    assert torch.equal(scales.view(torch.int32), reference.scales.view(torch.int32))
    assert scales.isnan().flatten().nonzero().flatten().tolist() == [4, 5, 6, 7]
    assert torch.equal(codes.float(), reference.codes.float())
    assert codes.is_contiguous() and scales.is_contiguous()


def test_no_rows_become_none() -> None:
    codes, scales = row_quantising.quantise_rows(torch.empty(0, 16, device=DEVICE))
    assert (codes.shape, scales.shape) == ((0, 16), (0, 1))


@needs_e4m3
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_a_weight_has_the_cpus_numbers_in_e4m3(dtype: torch.dtype) -> None:
    """A worker quantises where its weights are."""
    weight = magnitudes(dtype)
    ours, expected = fp8_product.quantise_weight(weight.to(DEVICE)), fp8_product.quantise_weight(weight)
    assert torch.equal(ours.codes.cpu().float(), expected.codes.float())
    assert torch.equal(ours.scales.cpu(), expected.scales)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_a_weight_has_the_cpus_codes_scales_and_zeros_in_4_bits(dtype: torch.dtype) -> None:
    weight = magnitudes(dtype)
    ours, expected = int4_matrix.quantise_weight(weight.to(DEVICE)), int4_matrix.quantise_weight(weight)
    assert torch.equal(ours.scales.cpu(), expected.scales)
    assert torch.equal(ours.zeros.cpu(), expected.zeros)
    assert torch.equal(ours.codes.cpu(), expected.codes)


def magnitudes(dtype: torch.dtype) -> Tensor:
    """Weight whose outputs have magnitudes of their own, one of them zeros: thousands of groups of 4 bits."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(1024, 8 * GROUP, generator=generator)
    weight *= torch.rand(1024, 1, generator=generator)
    weight[7] = 0.0
    return weight.to(dtype)


@gpu_only
@needs_e4m3
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 130])
def test_the_devices_product_is_that_of_the_dequantised_numbers(
    num_rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    rows = row_quantising.quantise_rows(random(num_rows, 512, seed=1, dtype=dtype))
    wide = random(272, 512, seed=2, dtype=dtype)
    weight = fp8_product.quantise_rows(wide)
    bias = random(1, 272, seed=3, dtype=dtype)[0] if has_bias else None
    product = fp8_product.fp8_product(rows, weight, fp8_product.fixed_bias(wide, bias), dtype)
    exact = rows.dequantised(torch.float64) @ weight.dequantised(torch.float64).t()
    if bias is not None:
        exact += bias.double()
    torch.testing.assert_close(product.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0.02)


def int4_case(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Int4Matrix, Tensor]:
    """Rows with NaN behind them, a weight of outputs and groups, and a bias."""
    num_outputs, num_groups = shape
    wide = random(num_rows, num_groups * GROUP + 16, seed=num_rows, dtype=dtype)
    wide[:, num_groups * GROUP :] = torch.nan
    weight = quantise_groups(random(num_outputs, num_groups * GROUP, seed=num_outputs, dtype=dtype))
    return wide[:, : num_groups * GROUP], weight, random(1, num_outputs, seed=3, dtype=dtype)[0]


def check_int4(num_rows: int, shape: tuple[int, int], dtype: torch.dtype, *, has_bias: bool) -> None:
    x, weight, bias = int4_case(num_rows, shape, dtype)
    added = bias if has_bias else None
    num_arrived = arrival_counters(shape[0], DEVICE)
    product = int4_product.int4_product(x, weight, added, num_arrived)
    same = int4_matrix.int4_product(x, weight, added, num_arrived)
    exact = int4_matrix.int4_product(x.double(), weight, None if added is None else added.double(), num_arrived)
    assert_as_exact_as_torch(product, same, exact)
    assert not num_arrived.any()
    assert torch.equal(int4_product.int4_product(x, weight, added, num_arrived), product)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 1), (65, 2), (200, 9)], ids=str)  # outputs, groups: the last in splits
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17])
def test_products_of_few_rows_follow_the_reference(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_int4(num_rows, shape, dtype, has_bias=num_rows % 2 == 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [63, 65, MOST_ROWS, MOST_ROWS + 1])
def test_products_of_more_rows_follow_the_reference(num_rows: int, dtype: torch.dtype) -> None:
    check_int4(num_rows, (72, 5), dtype, has_bias=True)


def test_some_of_these_products_are_split_and_some_are_not() -> None:
    tilings = [int4_tiling(1, *shape, torch.float32, torch.device("cpu")) for shape in ((64, 1), (200, 9), (72, 5))]
    assert [each.num_splits for each in tilings] == [1, 3, 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_is_written_out_as_the_reference_does(dtype: torch.dtype) -> None:
    _, weight, _ = int4_case(1, (37, 3), dtype)
    assert torch.equal(int4_product.expanded(weight, dtype), weight.dequantised(dtype))


def test_no_rows_have_no_product() -> None:
    x, weight, bias = int4_case(1, (64, 1), torch.float32)
    assert int4_product.int4_product(x[:0], weight, bias, arrival_counters(64, DEVICE)).shape == (0, 64)
