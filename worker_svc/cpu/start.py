"""Choice of a CPU's kernels and of the form of the weights, made once at the start and logged."""

from dataclasses import dataclass

import structlog
import torch

from kernels.native.compiling import NativeUnavailableError
from kernels.native.cpu_kernels import CpuKernels
from kernels.native.native_kernels import NativeKernels, choose_kernels
from worker_svc.cpu.packing import Packing, choose_packing
from worker_svc.option_check import int8_needs_kernels
from worker_svc.runner_choice import DeviceError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HostChoice:
    """Kernels, and the form of the weights."""

    kernels: CpuKernels
    packing: Packing


def choose_host(kernels: str, dtype: torch.dtype, *, int8_weights: bool, int8_kv: bool) -> HostChoice:
    """Choose by the setting `kernels`. Raises DeviceError if native kernels are required and unavailable."""
    try:
        chosen, shortcoming = choose_kernels(kernels, dtype)
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
