"""Choice of a CPU's kernels and of the form of the weights, made once at the start and logged."""

from typing import NamedTuple

import structlog
import torch

from kernels.native.compiling import NativeUnavailableError
from kernels.native.cpu_kernels import CpuKernels
from kernels.native.native_kernels import NativeKernels, choose_kernels
from kernels.native.packed_product import ProductMaker
from quire import machine
from worker_svc.cpu import onednn_linear
from worker_svc.cpu.onednn_linear import OneDnnLinear
from worker_svc.model.layers import Linear, MakeProduct
from worker_svc.option_check import DeviceError, int8_needs_kernels

log = structlog.get_logger()


class Packing(NamedTuple):
    """One form of weights."""

    name: str  # for logs
    make_product: MakeProduct
    shortcoming: str | None = None  # why no faster form is used


class HostChoice(NamedTuple):
    """Kernels, and the form of the weights."""

    kernels: CpuKernels
    packing: Packing


def choose_host(
    kernels: str, dtype: torch.dtype, *, int8_weights: bool, int8_kv: bool, head_dim: int | None = None
) -> HostChoice:
    """Choose by the setting `kernels`, and by the size of the model's heads, if it is given.

    Raises DeviceError if native kernels are required and unavailable.
    """
    try:
        chosen, shortcoming = choose_kernels(kernels, dtype, head_dim, machine.num_processors())
    except NativeUnavailableError as error:
        raise DeviceError(f"--kernels native was asked for: {error}; give --kernels auto or torch") from error
    if shortcoming is not None:
        log.warning("without native kernels steps are slower", reason=shortcoming)
    has_native = isinstance(chosen, NativeKernels)
    for flag, is_asked in (("--kv-dtype", int8_kv), ("--weight-dtype", int8_weights)):
        if is_asked and not has_native:
            raise DeviceError(int8_needs_kernels(flag, shortcoming or f"--kernels {kernels} was given"))
    packing = choose_packing(dtype, has_native=has_native, int8=int8_weights)
    if packing.shortcoming is not None:
        log.warning("without packed weights steps are slower", reason=packing.shortcoming)
    return HostChoice(chosen, packing)


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
