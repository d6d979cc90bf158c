"""Tolerance of a kernel against its reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.kernels.on_device.devices import HAS_GPU

EXP2_ERROR = 2.0**-22  # relative, of ex2.approx.f32, which a GPU's kernels use and torch does not


def assert_as_exact_as_torch(result: Tensor, same_dtype: Tensor, exact: Tensor) -> None:
    """The error against the reference in float32 or better is at most twice that of the reference in the same dtype.

    The epsilon is a unit in the last place of the largest value that is expected.
    """
    assert result.shape == same_dtype.shape
    assert result.dtype == same_dtype.dtype
    exact = exact.double()
    epsilon = exact.abs().max() * torch.finfo(result.dtype).eps
    error = (result.double() - exact).abs()
    reference_error = (same_dtype.double() - exact).abs()
    assert error.isfinite().all()
    assert error.max() <= 2 * reference_error.max() + epsilon
    assert error.mean() <= 2 * reference_error.mean() + epsilon


def assert_attends_as_exactly_as_torch(
    result: Tensor, same_dtype: Tensor, exact: Tensor, values: Sequence[Tensor]
) -> None:
    """The error against float64 is at most twice that of the formula in the same dtype, an ulp of 1, and exp2's.

    Of the mean error the ulp's part is a tenth. The powers of two of a GPU are less exact than torch's: weights p,
    which sum up to 1, become p (1 + d) with |d| <= EXP2_ERROR, and the attended m = sum(p v) moves by sum(p d (v - m))
    at most. That is no more than EXP2_ERROR times the mean distance from m of values v within -M to M, which is at most
    M. So in float32 a GPU has EXP2_ERROR times the largest value beside the rest, the mean too; 16 bits hide it.
    """
    assert result.shape == same_dtype.shape == exact.shape
    assert result.dtype == same_dtype.dtype
    ulp, powers = torch.finfo(result.dtype).eps, 0.0
    if HAS_GPU and result.dtype == torch.float32:
        powers = EXP2_ERROR * max(float(each.float().abs().max()) for each in values if len(each))
    error = (result.double() - exact).abs()
    formulas_error = (same_dtype.double() - exact).abs()
    assert error.isfinite().all()
    assert error.max() <= 2 * formulas_error.max() + ulp + powers
    assert error.mean() <= 2 * formulas_error.mean() + ulp / 10 + powers
