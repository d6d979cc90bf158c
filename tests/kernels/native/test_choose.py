"""The choice without logits: what the greedy kernel finds in a product's outputs, to the last tie."""

import math

import pytest
import torch
from torch import Tensor

from kernels.native.cpu_kernels import GreedyTokens
from kernels.native.native_kernels import NativeKernels
from kernels.native.packed_product import PackedProduct, ProductMaker

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
INT8 = pytest.mark.parametrize("int8", [False, True], ids=["whole", "int8"])
ROW_COUNTS = (1, 2, 3, 6, 7, 59, 61, 130)  # few, a chunk, a block, several blocks


pytestmark = pytest.mark.usefixtures("native_on_two_threads")


def matrices(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, bias and rows, of small whole numbers: many outputs of a row are the same."""
    generator = torch.Generator().manual_seed(num_outputs)
    sizes = ((num_outputs, num_inputs), (num_outputs,), (max(ROW_COUNTS), num_inputs))
    weight, bias, rows = (torch.randint(-2, 3, size, generator=generator).to(dtype) for size in sizes)
    return weight, bias, rows


def chosen_by(product: PackedProduct, rows: Tensor) -> GreedyTokens:
    chosen = GreedyTokens(torch.full((len(rows),), -1), torch.zeros(len(rows), dtype=torch.bool))
    product.choose(rows, chosen)
    return chosen


def assert_as_of_outputs(kernels: NativeKernels, product: PackedProduct, rows: Tensor) -> None:
    expected = GreedyTokens(torch.full((len(rows),), -1), torch.zeros(len(rows), dtype=torch.bool))
    kernels.greedy(product(rows), expected)
    chosen = chosen_by(product, rows)
    assert chosen.token_ids.tolist() == expected.token_ids.tolist()
    assert chosen.is_finite.tolist() == expected.is_finite.tolist()


@DTYPES
@INT8
@pytest.mark.parametrize("num_outputs", [1, 5, 16, 64, 211, 3001])
def test_the_choice_is_that_of_the_outputs(
    native_on_two_threads: NativeKernels, num_outputs: int, int8: bool, dtype: torch.dtype
) -> None:
    weight, bias, rows = matrices(num_outputs, 20, dtype)
    for given in (bias, None):
        product = ProductMaker(int8=int8)(weight, given)
        for count in ROW_COUNTS:
            assert_as_of_outputs(native_on_two_threads, product, rows[:count])


@DTYPES
@INT8
def test_the_choice_among_outputs_that_rounding_makes_equal_is_the_first(
    native_on_two_threads: NativeKernels, int8: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(3001, 300, generator=generator).to(dtype)
    rows = torch.randn(61, 300, generator=generator).to(dtype)
    assert_as_of_outputs(native_on_two_threads, ProductMaker(int8=int8)(weight, None), rows)


@DTYPES
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 13])
def test_a_row_whose_outputs_are_not_finite_is_told_apart(
    native_on_two_threads: NativeKernels, num_rows: int, bad: float, dtype: torch.dtype
) -> None:
    weight, bias, rows = matrices(211, 20, dtype)
    rows = rows[:num_rows].clone()
    rows[-1, 3] = bad
    weight[200, 3] = 1.0
    product = ProductMaker()(weight, bias)
    chosen = chosen_by(product, rows)
    assert chosen.is_finite.tolist() == [True] * (num_rows - 1) + [False]
    assert chosen.token_ids[-1] == 0
    assert_as_of_outputs(native_on_two_threads, product, rows)


@DTYPES
def test_an_output_too_large_for_the_dtype_is_not_finite(
    native_on_two_threads: NativeKernels, dtype: torch.dtype
) -> None:
    weight, rows = torch.full((211, 4), 1e38).to(dtype), torch.ones(2, 4).to(dtype)
    rows[0] = 0.125
    product = ProductMaker()(weight, None)
    assert chosen_by(product, rows).is_finite.tolist() == [True, False]
    assert_as_of_outputs(native_on_two_threads, product, rows)


def test_all_outputs_far_below_zero_still_have_a_greatest() -> None:
    weight, rows = torch.full((5, 4), -8e37), torch.ones(2, 4)
    weight[3] = -7e37
    assert chosen_by(ProductMaker()(weight, None), rows).token_ids.tolist() == [3, 3]


def test_no_rows_are_no_choices() -> None:
    weight, bias, _ = matrices(16, 20, torch.float32)
    assert chosen_by(ProductMaker()(weight, bias), torch.empty(0, 20)).token_ids.tolist() == []
