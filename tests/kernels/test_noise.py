"""The noise: pinned bits, the same in any batch, uniform, and independent along each of its four coordinates."""

import functools
import math
from collections.abc import Sequence

import pytest
import torch
from scipy import stats
from torch import Tensor

from kernels.sampling.noise import gumbel, noise_bits, row_keys, uniform

torch.set_num_threads(1)  # on contended cores two threads mostly wait for each other

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
MIN_P_VALUE = 1e-4  # of each of some fifty tests, so that one false alarm in all has a chance of 0.005
MASK_32, MASK_64 = 2**32 - 1, 2**64 - 1

GOLDEN = {  # (seed, sample index, position, token id): bits
    (0, 0, 0, 0): 0xF72A4EC1,
    (0, 0, 0, 1): 0x25B27E90,
    (1, 0, 0, 0): 0x15D7D63C,
    (2**64 - 1, 0, 17, 50256): 0x49FB8E01,
    (2**63, 3, 4095, 31999): 0x4F6EF83D,
    (0x0123456789ABCDEF, 2**31 - 1, 131071, 151935): 0xE107F4E8,
}


def bits_of(
    seeds: Sequence[int], sample_indices: Sequence[int], positions: Sequence[int], token_ids: Sequence[int]
) -> Tensor:
    """Unsigned bits, int64 [N], of N quadruples."""
    tokens = torch.tensor(token_ids, dtype=torch.int32)
    return noise_bits(row_keys(seeds, sample_indices, positions), tokens).to(torch.int64) & MASK_32


@functools.cache
def along(axis: str, count: int = 1 << 16) -> Tensor:
    """Bits of `count` neighbours along one coordinate, the others fixed."""
    fixed = {"seed": 7, "sample_index": 1, "position": 100, "token_id": 42}
    columns = {name: range(count) if name == axis else [value] * count for name, value in fixed.items()}
    return bits_of(*[list(column) for column in columns.values()])


AXES = ["seed", "sample_index", "position", "token_id"]


def splitmix_finaliser(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK_64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK_64
    return x ^ (x >> 31)


def finaliser_32(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x21F0AAAD & MASK_32
    x = (x ^ (x >> 15)) * 0x735A2D97 & MASK_32
    return x ^ (x >> 15)


def bits_in_plain_integers(seed: int, sample_index: int, position: int, token_id: int) -> int:
    key = 0
    for word in (seed, sample_index, position):
        key = splitmix_finaliser(((key ^ word) + 0x9E3779B97F4A7C15) & MASK_64)
    bits = finaliser_32((token_id * 0x9E3779B1 + key) & MASK_32)
    return finaliser_32((bits + (key >> 32)) & MASK_32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("place", "bits"), GOLDEN.items())
def test_bits_are_the_ones_they_always_were(place: tuple[int, int, int, int], bits: int, device: str) -> None:
    seed, sample_index, position, token_id = place
    keys = row_keys([seed], [sample_index], [position]).to(device)
    tokens = torch.tensor([token_id], dtype=torch.int32, device=device)
    assert int(noise_bits(keys, tokens)) & MASK_32 == bits


def test_wrap_around_tensors_agree_with_plain_integers() -> None:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**63), 2**63 - 1, (4, 500), generator=generator)
    seeds = [word & MASK_64 for word in words[0].tolist()]
    indices, positions, tokens = (words[1:] & 0x3FFFF).tolist()
    expected = [bits_in_plain_integers(*place) for place in zip(seeds, indices, positions, tokens, strict=True)]
    assert bits_of(seeds, indices, positions, tokens).tolist() == expected


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 1000, 50257])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(vocab_size: int) -> None:
    tokens = torch.arange(vocab_size, dtype=torch.int32)
    keys = row_keys(list(range(64)), [0] * 64, [9] * 64)
    batch = noise_bits(keys[:, None], tokens)
    for row in (0, 5, 63):
        assert torch.equal(noise_bits(keys[row : row + 1, None], tokens)[0], batch[row])
    some = torch.tensor([0, vocab_size // 2, vocab_size - 1], dtype=torch.int32)
    assert torch.equal(noise_bits(keys[[5, 5, 5]], some), batch[5, some.long()])


@pytest.mark.parametrize("device", DEVICES)
def test_the_uniform_is_exact_and_never_touches_its_ends(device: str) -> None:
    bits = torch.tensor([-(2**31), -1, 0, 2**31 - 1], dtype=torch.int32, device=device)
    expected = [2.0**-33, 0.5 - 2.0**-33, 0.5 + 2.0**-33, 1 - 2.0**-33]
    assert uniform(bits).tolist() == expected
    ends = [-math.log(33 * math.log(2)), -math.log(-math.log1p(-(2.0**-33)))]
    assert gumbel(bits).tolist()[::3] == pytest.approx(ends, abs=1e-9)


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    keys = row_keys(list(range(20)), [0] * 20, [0] * 20)
    noise = gumbel(noise_bits(keys[:, None], torch.arange(10_000, dtype=torch.int32)))
    assert stats.kstest(noise.flatten().numpy(), stats.gumbel_r.cdf).pvalue > 0.001


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_each_byte_is_uniform_along_each_coordinate(axis: str, shift: int) -> None:
    values = (along(axis) >> shift) & 0xFF
    assert stats.chisquare(torch.bincount(values, minlength=256).numpy()).pvalue > MIN_P_VALUE


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("distance", [1, 2, 16, 1000])
@pytest.mark.parametrize("shift", [0, 28], ids=["low bits", "high bits"])
def test_neighbours_are_independent_along_each_coordinate(axis: str, distance: int, shift: int) -> None:
    values = (along(axis) >> shift) & 0xF
    whole = len(values) // (2 * distance) * 2 * distance
    first, second = values[:whole].view(-1, 2, distance).unbind(1)  # no value is in two pairs
    pairs = (first * 16 + second).flatten()
    assert stats.chisquare(torch.bincount(pairs, minlength=256).numpy()).pvalue > MIN_P_VALUE


@pytest.mark.parametrize("first", AXES)
@pytest.mark.parametrize("second", AXES)
def test_coordinates_are_not_interchangeable(first: str, second: str) -> None:
    if first == second:
        assert len(set(along(first, 4096).tolist())) > 4090  # 32 bits: at most a collision or two in 4096
    else:
        assert int((along(first, 4096)[200:] == along(second, 4096)[200:]).sum()) <= 1


@pytest.mark.parametrize(("axis", "num_bits"), [("seed", 64), ("sample_index", 31), ("position", 20), ("token_id", 17)])
def test_flipping_any_input_bit_flips_each_output_bit_half_the_time(axis: str, num_bits: int) -> None:
    generator = torch.Generator().manual_seed(2)
    count = 4000
    words = torch.randint(0, 1 << 17, (4, count), generator=generator)
    base = bits_of(*words.tolist())
    for bit in range(num_bits):
        flipped = words.tolist()
        row = AXES.index(axis)
        flipped[row] = [word ^ (1 << bit) for word in flipped[row]]
        changed = base ^ bits_of(*flipped)
        rates = torch.stack([(changed >> i) & 1 for i in range(32)]).double().mean(1)
        # 5.5 standard deviations of a fair coin thrown 4000 times: about one false alarm in 10^5 for all of it.
        assert (rates - 0.5).abs().max() < 5.5 * 0.5 / count**0.5, f"bit {bit} of {axis}"
