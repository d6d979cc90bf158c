"""Tolerance of a kernel against its reference."""

import torch
from torch import Tensor


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
