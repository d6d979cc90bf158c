"""Products with packed weights: native ones, and oneDNN's where this machine has them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.native.packed_product import PackedProduct, ProductMaker, rounded_to_int8
from kernels.products import output_slices
from worker_svc.cpu import onednn_linear
from worker_svc.cpu.onednn_linear import OneDnnLinear
from worker_svc.cpu.start import choose_packing
from worker_svc.model.layers import Linear
from worker_svc.option_check import DeviceError

SHAPES = ((64, 40), (1, 7), (211, 64), (50, 300), (768, 520))  # outputs, inputs: whole panels and chunks, and not
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 25, 31, 33, 48, 61, 130, 300)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True, scope="module")
def _two_threads() -> None:
    torch.set_num_threads(2)


def matrices(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, bias and rows."""
    generator = torch.Generator().manual_seed(sum(shape))
    num_outputs, num_inputs = shape
    sizes = ((num_outputs, num_inputs), (num_outputs,), (max(ROW_COUNTS), num_inputs))
    weight, bias, rows = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return weight, bias, rows


def assert_as_exact(product: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Assert that the result is as near to the exact product as float32 sums in any order are, rounded once."""
    exact = rows.double() @ weight.double().t()
    largest = rows.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, largest = exact + bias.double(), largest + bias.double().abs()
    error = (product.double() - exact).abs()
    rounding = torch.finfo(product.dtype).eps * exact.abs()
    assert (error <= rounding + rows.shape[1] * 2**-24 * largest).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_native_product_is_exact_but_for_rounding(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias, rows = matrices(shape, dtype)
    make = ProductMaker()
    assert_as_exact(make(weight, bias)(rows), rows, weight, bias)
    assert_as_exact(make(weight, None)(rows), rows, weight, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_of_the_native_product_does_not_depend_on_the_rows_beside_it(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, bias, rows = matrices(shape, dtype)
    for product in (ProductMaker()(weight, bias), ProductMaker(int8=True)(weight, bias)):
        every = product(rows)
        for count in ROW_COUNTS:
            assert torch.equal(product(rows[-count:]), every[-count:])


def test_rows_and_results_may_be_parts_of_wider_matrices() -> None:
    weight, bias, rows = matrices((50, 300), torch.bfloat16)
    product = ProductMaker()(weight, bias)
    num_rows = len(rows)
    wide, out = torch.full((num_rows, 400), float("nan")).bfloat16(), torch.full((num_rows, 90), 7.0).bfloat16()
    wide[:, :300] = rows
    returned = product(wide[:, :300], out[:, :50])
    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :50], product(rows))
    assert (out[:, 50:] == 7.0).all()


def test_no_rows_give_no_results() -> None:
    weight, bias, _ = matrices((64, 40), torch.float32)
    assert ProductMaker()(weight, bias)(torch.empty(0, 40)).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_weights_are_multiplied_as_they_were_rounded(dtype: torch.dtype) -> None:
    weight, bias, rows = matrices((211, 64), dtype)
    rounded, scales = rounded_to_int8(weight)
    product = ProductMaker(int8=True)(weight, bias)(rows)
    assert_as_exact(product, rows, rounded.double() * scales.double().unsqueeze(1), bias)


def test_int8_weights_are_within_half_a_step_and_the_greatest_is_kept() -> None:
    weight, _, _ = matrices((64, 40), torch.float32)
    weight[3] = 0.0
    rounded, scales = rounded_to_int8(weight)
    assert ((rounded * scales.unsqueeze(1) - weight).abs() <= scales.unsqueeze(1) * (0.5 + 1e-5)).all()
    assert (rounded.abs().amax(1)[torch.arange(64) != 3] == 127).all()
    assert (rounded[3] == 0).all()


class LargestFloat(TorchDispatchMode):
    """Notes the size of the largest tensor of float32 that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor) and each.dtype == torch.float32:
                self.numel = max(self.numel, each.numel())
        return made


def test_no_wide_copy_of_a_whole_matrix_is_made_while_it_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: rounding a head of 8 B parameters took three copies of it as float32, more than some models."""
    weight, _, _ = matrices((211, 64), torch.bfloat16)
    weight[100] = 0.0
    whole = rounded_to_int8(weight)
    monkeypatch.setattr(output_slices, "SLICE_NUMBERS", 1000)  # 15 outputs
    with LargestFloat() as largest:
        rounded = rounded_to_int8(weight)
    assert all(map(torch.equal, rounded, whole))
    assert largest.numel <= 1000


@pytest.mark.skipif(onednn_linear.supports(torch.float32) is not None, reason="oneDNN packs nothing here")
def test_onednns_product_is_exact_but_for_rounding() -> None:
    weight, bias, rows = matrices((211, 64), torch.float32)
    assert_as_exact(OneDnnLinear(weight, bias)(rows), rows, weight, bias)


def test_without_native_kernels_float32_is_packed_by_onednn_or_not_at_all() -> None:
    packing = choose_packing(torch.float32, has_native=False)
    if onednn_linear.supports(torch.float32) is None:
        assert (packing.make_product, packing.shortcoming) == (OneDnnLinear, None)
    else:
        assert packing.make_product is Linear
        assert packing.shortcoming


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_products_come_first(dtype: torch.dtype) -> None:
    assert choose_packing(dtype, has_native=True).name == "native"


def test_int8_weights_without_native_kernels_are_refused() -> None:
    with pytest.raises(DeviceError, match="--weight-dtype int8 needs native kernels, and there are none"):
        choose_packing(torch.float32, has_native=False, int8=True)


def test_the_weight_is_held_once() -> None:
    weight, bias, _ = matrices((64, 96), torch.bfloat16)
    product = ProductMaker()(weight, bias)
    assert isinstance(product, PackedProduct)
    assert (
        product._packed.nbytes == weight.nbytes
    )  # 64 outputs and 96 inputs are whole panels and steps on every machine
    product = ProductMaker(int8=True)(weight, bias)
    assert product._scales is not None
    assert (product._packed.nbytes, product._scales.nbytes) == (weight.numel(), 64 * 4)
