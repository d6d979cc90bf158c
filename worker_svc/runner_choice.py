"""Chooses the runner, its device and the dtype of keys and values, from the settings and the machine.

`detect_machine` reads the machine; `choose_runner` decides from its result alone.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from worker_svc.option_check import (
    DEVICE_DTYPES,
    DeviceError,
    attention_refused,
    cpu_runner_refused,
    device_number,
    device_runner_needed,
    has_triton,
    int8_refused,
    kernels_missing,
    num_cuda_devices,
)

RunnerKind = Literal["cpu", "device"]
KvDtype = Literal["auto", "fp8", "int8"]
WeightDtype = Literal["auto", "int8", "fp8", "int4"]
AttentionName = Literal["auto", "triton", "flashinfer", "flash-attn"]

_KV_DTYPES: dict[KvDtype, torch.dtype | None] = {"auto": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_FP8_CAPABILITY = (8, 9)  # the least compute capability that has e4m3
_KERNELS_CAPABILITY = (8, 0)  # the least for which the kernels are made: tiles of others do not fit their memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Devices and libraries of the machine."""

    cuda_capabilities: tuple[tuple[int, int], ...] = ()  # of each CUDA device
    current_cuda_device: int = 0
    has_triton: bool = False
    why_no_cuda: str | None = None  # torch sees none of the CUDA devices that the driver has


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedRunner:
    """Settings that the choice depends on, with the values of `WorkerSettings`."""

    device: str
    runner: Literal["auto", "cpu", "device"]
    kv_dtype: KvDtype
    weight_dtype: WeightDtype = "auto"
    num_ranks: int = 1  # of a group on this machine, each on a device of its own, one after the other
    attention: AttentionName = "auto"
    worker_number: int = 0  # among the workers of the machine, which take one device after the other


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerChoice:
    """The chosen runner, its device and the dtype of keys and values."""

    kind: RunnerKind
    device: torch.device
    kv_dtype: torch.dtype | None  # of keys and values; None: the weights'
    why_not_cuda: str | None = None  # reason why a CPU computes, though there are CUDA devices and none was asked for

    @property
    def has_kernels(self) -> bool:
        """True if Triton kernels compute; else torch's operators and the references of the kernels do."""
        return self.kind == "device" and self.device.type == "cuda"


def detect_machine() -> Machine:
    """The machine as torch sees it."""
    if not torch.cuda.is_available():
        return Machine(has_triton=has_triton(), why_no_cuda=_why_torch_sees_none(num_cuda_devices() or 0))
    return Machine(
        cuda_capabilities=tuple(torch.cuda.get_device_capability(each) for each in range(torch.cuda.device_count())),
        current_cuda_device=torch.cuda.current_device(),
        has_triton=has_triton(),
    )


def choose_runner(requested: RequestedRunner, machine: Machine) -> RunnerChoice:
    """Chooses runner, device and dtype. Raises DeviceError if the machine lacks a requested device or package."""
    device = _device(requested.device, machine)
    kind = requested.runner
    if kind == "auto":
        kind = "device" if device.type == "cuda" else "cpu"
    if kind == "cpu" and device.type != "cpu":
        raise DeviceError(cpu_runner_refused(device))
    if device.type == "cuda":
        device = _device_of_worker(device, requested, len(machine.cuda_capabilities))
        if (why_not := _why_no_kernels(_index(device), machine)) is not None:
            raise DeviceError(f"--device {requested.device}: {why_not}: use --device cpu")
    if requested.attention != "auto" and device.type != "cuda":
        raise DeviceError(attention_refused(requested.attention, device))
    why_not_cuda = _why_no_device(machine) if requested.device == "auto" and device.type == "cpu" else None
    choice = RunnerChoice(kind=kind, device=device, kv_dtype=_KV_DTYPES[requested.kv_dtype], why_not_cuda=why_not_cuda)
    if choice.has_kernels and not machine.has_triton:
        raise DeviceError(kernels_missing(device))
    for flag, dtype in (("--kv-dtype", requested.kv_dtype), ("--weight-dtype", requested.weight_dtype)):
        if dtype in DEVICE_DTYPES and choice.kind != "device":
            raise DeviceError(device_runner_needed(flag, dtype))
        if dtype == "fp8":
            _check_fp8(flag, choice, machine)
        if dtype == "int8" and choice.kind != "cpu":
            raise DeviceError(int8_refused(flag))
    return choice


def device_of_rank(first: torch.device, rank: int) -> str:
    """Name of the device of a rank, on the machine on which rank 0 has the first one."""
    return f"cuda:{_index(first) + rank}" if first.type == "cuda" else str(first)


def device_kind(device: torch.device) -> str:
    """Kind of a device in words, equal for devices on which a pass is the same."""
    if device.type != "cuda":
        return "the CPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} with {properties.multi_processor_count} multiprocessors"


def _device(name: str, machine: Machine) -> torch.device:
    if name == "auto":
        name = "cuda" if machine.cuda_capabilities and _why_no_device(machine) is None else "cpu"
    if name == "cuda":
        name = f"cuda:{machine.current_cuda_device}"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    asked = f"--device {name} was asked for, but"
    if not machine.cuda_capabilities:
        why = "" if machine.why_no_cuda is None else f" ({machine.why_no_cuda})"
        raise DeviceError(f"{asked} torch sees no CUDA device{why}: use --device cpu")
    if _index(device) >= len(machine.cuda_capabilities):
        last = len(machine.cuda_capabilities) - 1
        raise DeviceError(f"{asked} the last CUDA device is cuda:{last}: use that or a lower number")
    return device


def _why_no_device(machine: Machine) -> str | None:
    """Reason why the CUDA device that would be taken cannot compute; None if it can, or there is none."""
    return _why_no_kernels(machine.current_cuda_device, machine) if machine.cuda_capabilities else machine.why_no_cuda


def _why_no_kernels(index: int, machine: Machine) -> str | None:
    capability = machine.cuda_capabilities[index]
    if capability >= _KERNELS_CAPABILITY:
        return None
    has, needs = _dotted(capability), _dotted(_KERNELS_CAPABILITY)
    return f"cuda:{index} has compute capability {has}, and the kernels need {needs}"


def _why_torch_sees_none(num_devices: int) -> str | None:
    """Reason why torch sees none of the driver's devices, of which there may be none."""
    if not num_devices:
        return None
    has, built_for = f"the driver has {num_devices} CUDA devices, and", torch.version.cuda
    if built_for is None:
        return f"{has} this torch is a build without CUDA ({torch.__version__}): install another"
    return (
        f"{has} may be too old for this torch, which is built for CUDA {built_for}: install a newer driver, or a build "
        "of torch for an earlier CUDA"
    )


def _device_of_worker(first: torch.device, requested: RequestedRunner, num_devices: int) -> torch.device:
    """Device of the worker's rank 0, where the machine's worker 0 begins at `first`. Raises DeviceError."""
    number, num_ranks = requested.worker_number, requested.num_ranks
    index = device_number(_index(first), worker_number=number, num_ranks=num_ranks, num_devices=num_devices)
    return torch.device(f"cuda:{index}")


def _index(device: torch.device) -> int:
    assert device.index is not None, "a CUDA device is chosen with its number"
    return device.index


def _check_fp8(flag: str, choice: RunnerChoice, machine: Machine) -> None:
    if choice.device.type != "cuda":
        return
    capability = machine.cuda_capabilities[_index(choice.device)]
    if capability < _FP8_CAPABILITY:
        raise DeviceError(
            f"{flag} fp8 needs compute capability {_dotted(_FP8_CAPABILITY)}, and {choice.device} has "
            f"{_dotted(capability)}: give {flag} auto"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
