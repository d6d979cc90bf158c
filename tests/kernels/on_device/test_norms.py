"""Norms by kernel, against the torch references."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kernels.layers import layer_ops, norms
from tests.kernels.on_device.devices import DEVICE, DTYPES
from tests.kernels.on_device.tolerance import assert_as_exact_as_torch

EPS = 1e-5
SIZES = [1, 15, 64, 257, 1024, 2050]
Norm = Callable[..., Tensor]
NORMS: dict[str, tuple[Norm, Norm]] = {
    "rms": (norms.rms_norm, layer_ops.rms_norm),
    "layer": (norms.layer_norm, layer_ops.layer_norm),
}


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3 + 0.5).to(DEVICE, dtype)


def applied(
    norm: Norm, x: Tensor, weights: Sequence[Tensor | None], residual: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The result in `dtype`, and the residual that is left; on copies."""
    x, kept = x.to(dtype, copy=True), None if residual is None else residual.to(dtype, copy=True)
    before = x.clone()
    out = norm(x, *(None if weight is None else weight.to(dtype) for weight in weights), EPS, kept)
    assert torch.equal(x, before)
    return out, kept


def check(kind: str, x: Tensor, weights: Sequence[Tensor | None], residual: Tensor | None = None) -> None:
    kernel, reference = NORMS[kind]
    before = x.clone()
    out = kernel(x, *weights, EPS)  # not on a copy, whose strides would be others
    assert torch.equal(x, before)
    assert out.is_contiguous()
    if residual is not None:
        out, kept = applied(kernel, x, weights, residual, x.dtype)
        assert kept is not None
        assert torch.equal(kept, residual + x)
    same, exact = (applied(reference, x, weights, residual, dtype)[0] for dtype in (x.dtype, torch.float64))
    assert_as_exact_as_torch(out, same, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", NORMS)
def test_rows_are_normalised(kind: str, size: int, dtype: torch.dtype) -> None:
    weights: list[Tensor | None] = [random(size, seed=1, dtype=dtype)]
    if kind == "layer":
        weights.append(random(size, seed=2, dtype=dtype))
    check(kind, random(3, size, seed=0, dtype=dtype), weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_the_residual_takes_the_sum_and_the_sum_is_normalised(kind: str, dtype: torch.dtype) -> None:
    weights: list[Tensor | None] = [random(130, seed=1, dtype=dtype)] + [None] * (kind == "layer")
    check(kind, random(5, 130, seed=0, dtype=dtype), weights, random(5, 130, seed=3, dtype=dtype))


@pytest.mark.parametrize("kind", NORMS)
def test_without_weights_rows_are_only_normalised(kind: str) -> None:
    check(kind, random(2, 48, seed=0, dtype=torch.float32), [None] * (1 + (kind == "layer")))


@pytest.mark.parametrize("kind", NORMS)
def test_heads_of_a_strided_view_are_rows(kind: str) -> None:
    qkv = random(4, 9, 32, seed=0, dtype=torch.float32)
    weights: list[Tensor | None] = [random(32, seed=1, dtype=torch.float32)] + [None] * (kind == "layer")
    check(kind, qkv[:, 2:7], weights)


def test_what_lies_beside_a_row_is_not_read() -> None:
    padded = torch.full((3, 100), torch.nan, device=DEVICE)
    padded[:, :90] = random(3, 90, seed=0, dtype=torch.float32)
    check("rms", padded[:, :90], [random(90, seed=1, dtype=torch.float32)])


def test_no_rows_make_no_rows() -> None:
    x = torch.empty(0, 16, device=DEVICE)
    assert norms.rms_norm(x, None, EPS).shape == (0, 16)
