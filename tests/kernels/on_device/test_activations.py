"""Gated activations by kernel, against the torch reference."""

from typing import get_args

import pytest
import torch

from kernels.layers import activations, layer_ops
from kernels.layers.layer_ops import Activation
from tests.kernels.on_device.devices import DEVICE, DTYPES
from tests.kernels.on_device.tolerance import assert_as_exact_as_torch

# Far below zero the interpreter's sigmoid says so; the result is 0 all the same.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 17, 1024, 1500])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gated_rows_follow_the_reference(activation: Activation, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    wide = (torch.randn(3, 2 * size + 5, generator=generator) * 3).to(DEVICE, dtype)
    wide[:, 2 * size :] = torch.nan
    x = wide[:, : 2 * size]
    out = activations.gated_activation(x, activation)
    reference = layer_ops.gated_activation
    assert_as_exact_as_torch(out, reference(x, activation), reference(x.double(), activation))
    assert out.is_contiguous()


@pytest.mark.parametrize("activation", get_args(Activation))
def test_gates_far_from_zero_are_open_or_shut(activation: Activation) -> None:
    x = torch.tensor([[-200.0, 200.0, 0.0, 3.0, 3.0, 3.0]], device=DEVICE)
    assert activations.gated_activation(x, activation).tolist() == [[0.0, 600.0, 0.0]]


def test_no_rows_make_no_rows() -> None:
    assert activations.gated_activation(torch.empty(0, 16, device=DEVICE), "silu").shape == (0, 8)
