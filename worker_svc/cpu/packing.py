"""Form of a model's weights on a CPU: packed for the products, or unchanged."""

from typing import NamedTuple

import torch

from kernels.native.packed_product import ProductMaker
from worker_svc.cpu import onednn_linear
from worker_svc.cpu.onednn_linear import OneDnnLinear
from worker_svc.model.layers import Linear, MakeProduct
from worker_svc.option_check import int8_needs_kernels
from worker_svc.runner_choice import DeviceError


class Packing(NamedTuple):
    """One form of weights."""

    name: str  # for logs
    make_product: MakeProduct
    shortcoming: str | None = None  # why no faster form is used


def choose_packing(dtype: torch.dtype, *, has_native: bool, int8: bool = False) -> Packing:
    """Choose the fastest form that works on this machine: native products, else oneDNN's, tried with a small product.

    Raises DeviceError if int8 is asked for and no product here multiplies it.
    """
    if int8:
        if not has_native or dtype not in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            raise DeviceError(int8_needs_kernels("--weight-dtype", f"there are none here for {name}"))
        return Packing("native int8", ProductMaker(int8=True))
    if has_native and dtype in (torch.float32, torch.bfloat16):
        return Packing("native", ProductMaker())
    reason = onednn_linear.supports(dtype)
    if reason is None:
        return Packing("onednn", OneDnnLinear)
    return Packing("plain", Linear, reason)
