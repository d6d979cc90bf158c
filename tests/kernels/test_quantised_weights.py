"""Weights of 8 and 4 bits as torch makes them: how near they are, where each bit lies, and products with them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.products import fp8_product as fp8_module
from kernels.products import int4_matrix, output_slices
from kernels.products.fp8_product import E4M3, Fp8Matrix, fp8_product, quantise_rows
from kernels.products.int4_matrix import GROUP, LARGEST, WORDS, Int4Matrix, int4_product, quantise_groups
from kernels.products.int4_tiling import MOST_ROWS, arrival_counters, int4_tiling

CPU = torch.device("cpu")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 2**32)


def random(num_outputs: int, num_inputs: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many magnitudes, some outputs and some groups all zero."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(num_outputs, num_inputs, generator=generator)
    numbers *= torch.exp2(torch.randint(-9, 5, (num_outputs, 1), generator=generator))
    numbers *= torch.rand(num_outputs, 1, generator=generator) > 0.1
    return numbers.to(dtype)


@given(seed=SEEDS, dtype=DTYPES, num_inputs=st.integers(1, 70))
def test_rows_in_e4m3_are_within_half_a_step_of_their_numbers(seed: int, dtype: torch.dtype, num_inputs: int) -> None:
    x = random(9, num_inputs, seed, dtype)
    matrix = quantise_rows(x)
    assert (matrix.codes.dtype, matrix.scales.shape) == (E4M3, (9, 1))
    # 3 bits of mantissa below the leading one; and steps of 2^-9 next to zero.
    error = (matrix.dequantised(torch.float64) - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * 2**-4, matrix.scales.double() * 2**-10)).all()


@given(seed=SEEDS, dtype=DTYPES)
def test_scales_are_powers_of_two_that_use_the_range(seed: int, dtype: torch.dtype) -> None:
    matrix = quantise_rows(random(9, 33, seed, dtype))
    assert (matrix.scales.frexp().mantissa == 0.5).all()
    peaks = matrix.codes.float().abs().amax(1)
    assert ((peaks == 0) | ((peaks > 448 / 2 - 16) & (peaks <= 448))).all()
    for narrow in (torch.bfloat16, torch.float16):
        assert torch.equal(matrix.dequantised(narrow).float(), matrix.dequantised(torch.float32))


@pytest.mark.parametrize("peak", [448.0, 448.0 * 2**-20, 1.75 * 2**30, 449.0, 1.7500001, 2.0**-120, 0.0])
def test_the_greatest_number_of_a_row_fits_wherever_it_lies(peak: float) -> None:
    x = torch.tensor([[peak, -peak, peak / 3]])
    matrix = quantise_rows(x)
    assert matrix.codes.float().isfinite().all()
    torch.testing.assert_close(matrix.dequantised(torch.float32), x, rtol=2**-4, atol=2.0**-118)


@given(seed=SEEDS, dtype=DTYPES, num_groups=st.integers(1, 3))
def test_weights_in_4_bits_are_about_half_a_step_from_their_numbers(
    seed: int, dtype: torch.dtype, num_groups: int
) -> None:
    weight = random(6, num_groups * GROUP, seed, dtype)
    matrix = quantise_groups(weight)
    assert (matrix.scales.dtype, matrix.scales.shape) == (dtype, (num_groups, 6))
    assert matrix.zeros.max() <= LARGEST
    error = (matrix.dequantised(torch.float64) - weight.double()).abs().view(6, num_groups, GROUP)
    # Half a step, and what the rounding of the step to 8 bits adds up to over 15 steps.
    assert (error <= matrix.scales.t().double().unsqueeze(2) * (0.5 + LARGEST * 2**-8)).all()


@given(seed=SEEDS)
def test_zeros_stay_zeros_in_4_bits(seed: int) -> None:
    weight = random(6, 2 * GROUP, seed)
    weight[:, ::5] = 0.0
    weight[0] = 0.0
    assert (quantise_groups(weight).dequantised(torch.float32)[weight == 0] == 0).all()


@given(st.data())
def test_every_number_in_4_bits_lies_where_the_layout_says(data: st.DataObject) -> None:
    """Sixteen steps of one scale are kept as they are; the code of any input is found by its place."""
    num_groups = data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(SEEDS))
    codes = torch.randint(0, LARGEST + 1, (4, num_groups * GROUP), generator=generator)
    codes[:, ::GROUP], codes[:, 1::GROUP] = 0, LARGEST  # all of the range in each group
    matrix = quantise_groups((codes - 6) * 0.25)
    assert torch.equal(matrix.dequantised(torch.float32), (codes - 6) * 0.25)
    assert (matrix.scales == 0.25).all() and (matrix.zeros == 6).all()
    output, group = data.draw(st.integers(0, 3)), data.draw(st.integers(0, num_groups - 1))
    place, word = data.draw(st.integers(0, 7)), data.draw(st.integers(0, WORDS - 1))
    bits = int(matrix.codes[output, WORDS * group + word]) >> 4 * place & LARGEST
    assert bits == codes[output, GROUP * group + WORDS * place + word]


@given(seed=SEEDS)
def test_slices_of_the_whole_are_what_a_slice_becomes(seed: int) -> None:
    """Slices of outputs in both forms, and of whole groups of inputs in 4 bits."""
    weight = random(8, 4 * GROUP, seed)
    whole, part = quantise_rows(weight), quantise_rows(weight[2:6])
    assert torch.equal(whole.codes[2:6].float(), part.codes.float()) and torch.equal(whole.scales[2:6], part.scales)
    groups, outputs = quantise_groups(weight), quantise_groups(weight[2:6])
    assert all(map(torch.equal, outputs, (groups.codes[2:6], groups.scales[:, 2:6], groups.zeros[:, 2:6])))
    inputs = quantise_groups(weight[:, GROUP : 3 * GROUP].contiguous())
    words = slice(WORDS, 3 * WORDS)
    assert all(map(torch.equal, inputs, (groups.codes[:, words], groups.scales[1:3], groups.zeros[1:3])))


@pytest.mark.parametrize("num_slices", [1, 3, 10])
def test_a_weight_is_quantised_in_slices_of_outputs_to_the_same_numbers(
    num_slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random(10, 2 * GROUP, seed=1)
    monkeypatch.setattr(output_slices, "SLICE_NUMBERS", -(-10 // num_slices) * 2 * GROUP)
    assert len(list(output_slices.output_slices(weight))) == num_slices
    fp8, int4 = fp8_module.quantise_weight(weight), int4_matrix.quantise_weight(weight)
    assert torch.equal(fp8.codes.float(), quantise_rows(weight).codes.float())
    assert torch.equal(fp8.scales, quantise_rows(weight).scales)
    assert all(map(torch.equal, int4, quantise_groups(weight)))
    assert all(each.is_contiguous() for each in (*fp8, *int4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 17])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_the_dequantised_numbers(has_bias: bool, num_rows: int, dtype: torch.dtype) -> None:
    weight = random(48, 2 * GROUP, seed=1, dtype=dtype) / 16
    x, bias = random(num_rows, 2 * GROUP, seed=2, dtype=dtype) / 16, random(1, 48, seed=3, dtype=dtype)[0]
    added = bias if has_bias else None
    rows, fp8, int4 = quantise_rows(x) if num_rows else _no_rows(), quantise_rows(weight), quantise_groups(weight)
    check_product(fp8_product(rows, fp8, added, dtype), rows.dequantised(torch.float64), fp8, added)
    check_product(int4_product(x, int4, added, arrival_counters(48, CPU)), x.double(), int4, added)


def test_a_cpus_product_of_e4m3_needs_no_scales_by_rows_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.13 there are none on a CPU; a stand-in refuses them as torch 2.11 does."""

    def refuse(*operands: Tensor, **options: object) -> Tensor:
        raise RuntimeError("_scaled_mm only supports per-tensor scaling for CPU backend")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    rows, weight = quantise_rows(random(3, 64, seed=2)), quantise_rows(random(48, 64, seed=1))
    check_product(fp8_product(rows, weight, None, torch.float32), rows.dequantised(torch.float64), weight, None)


def test_a_gpus_sums_of_e4m3_are_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is told so: left to itself, Hopper's matrix units keep about 14 bits of a sum."""
    given: list[dict[str, object]] = []

    def record(*operands: Tensor, **options: object) -> Tensor:
        given.append(options)
        return torch.empty(0)

    monkeypatch.setattr(torch, "_scaled_mm", record)
    rows, weight = quantise_rows(random(3, 64, seed=2)), quantise_rows(random(48, 64, seed=1))
    fp8_module.product_on_gpu(rows, weight, None, torch.bfloat16)
    assert [options["use_fast_accum"] for options in given] == [False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_products_of_a_row_that_is_not_finite_are_nan_and_those_of_others_stay(
    number: float, dtype: torch.dtype
) -> None:
    weight, x = quantise_rows(random(48, 64, seed=1)), random(3, 64, seed=2, dtype=dtype)
    expected = fp8_product(quantise_rows(x), weight, None, dtype)
    x[1, 5] = number
    product = fp8_product(quantise_rows(x), weight, None, dtype)
    assert product[1].isnan().all()
    assert torch.equal(product[::2], expected[::2])


def check_product(product: Tensor, rows: Tensor, weight: Fp8Matrix | Int4Matrix, bias: Tensor | None) -> None:
    """Assert that the product is as near to the exact one as rounding of the weight and of the result allow."""
    numbers = weight.dequantised(torch.float64)
    exact, largest = rows @ numbers.t(), rows.abs() @ numbers.abs().t()
    if bias is not None:
        exact = exact + bias.double()
    epsilon, tiny = torch.finfo(product.dtype).eps, torch.finfo(product.dtype).smallest_normal
    bound = epsilon * (exact.abs() + largest + tiny * (1 + rows.abs().sum(1, keepdim=True))) + 2**-16 * largest
    assert product.shape == exact.shape
    assert ((product.double() - exact).abs() <= bound).all()


def _no_rows() -> Fp8Matrix:
    return Fp8Matrix(torch.empty((0, 2 * GROUP), dtype=E4M3), torch.empty((0, 1)))


@pytest.mark.parametrize(
    ("dtype", "bits", "base"),
    [
        (torch.float16, int4_matrix.FLOAT16_BASE_BITS, int4_matrix.FLOAT16_BASE),
        (torch.bfloat16, int4_matrix.BFLOAT16_BASE_BITS, int4_matrix.BFLOAT16_BASE),
    ],
    ids=str,
)
def test_codes_in_the_mantissa_of_a_base_are_numbers_and_differ_exactly(
    dtype: torch.dtype, bits: int, base: float
) -> None:
    """The kernel's conversion, with all codes and zero points: Triton's interpreter has no bfloat16."""
    codes = torch.arange(LARGEST + 1)
    numbers = (codes | bits).to(torch.int16).view(dtype)
    assert torch.equal(numbers.double(), codes + base)
    differences = numbers.unsqueeze(1) - (codes.to(dtype) + base)
    assert differences.dtype == dtype
    assert torch.equal(differences.double(), (codes.unsqueeze(1) - codes).double())


@given(
    num_rows=st.integers(1, MOST_ROWS), num_outputs=st.integers(1, 30_000), num_groups=st.integers(1, 230), dtype=DTYPES
)
def test_tiles_and_splits_cover_a_product_once(
    num_rows: int, num_outputs: int, num_groups: int, dtype: torch.dtype
) -> None:
    tiling = int4_tiling(num_rows, num_outputs, num_groups, dtype, CPU)
    assert (tiling.num_row_tiles - 1) * tiling.rows < num_rows <= tiling.num_row_tiles * tiling.rows
    assert (tiling.num_splits - 1) * tiling.split_groups < num_groups <= tiling.num_splits * tiling.split_groups
    assert tiling.num_tiles <= len(arrival_counters(num_outputs, CPU))
    alone = int4_tiling(1, num_outputs, num_groups, dtype, CPU)
    assert (tiling.num_splits, tiling.split_groups) == (alone.num_splits, alone.split_groups)
