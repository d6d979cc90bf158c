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
)

RunnerKind = Literal["cpu", "device"]
KvDtype = Literal["auto", "fp8", "int8"]
WeightDtype = Literal["auto", "int8", "fp8", "int4"]
AttentionName = Literal["auto", "triton", "flashinfer", "flash-attn"]

_KV_DTYPES: dict[KvDtype, torch.dtype | None] = {"auto": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_FP8_CAPABILITY = (8, 9)  # the least compute capability that has e4m3


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Devices and libraries of the machine."""

    cuda_capabilities: tuple[tuple[int, int], ...] = ()  # of each CUDA device
    current_cuda_device: int = 0
    has_triton: bool = False


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

    @property
    def has_kernels(self) -> bool:
        """True if Triton kernels compute; else torch's operators and the references of the kernels do."""
        return self.kind == "device" and self.device.type == "cuda"


def detect_machine() -> Machine:
    """The machine as torch sees it."""
    if not torch.cuda.is_available():
        return Machine(has_triton=has_triton())
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
    if requested.attention != "auto" and device.type != "cuda":
        raise DeviceError(attention_refused(requested.attention, device))
    choice = RunnerChoice(kind=kind, device=device, kv_dtype=_KV_DTYPES[requested.kv_dtype])
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
        name = "cuda" if machine.cuda_capabilities else "cpu"
    if name == "cuda":
        name = f"cuda:{machine.current_cuda_device}"
    device = torch.device(name)
    if device.type == "cuda" and not machine.cuda_capabilities:
        raise DeviceError(f"--device {name} was asked for, but torch sees no CUDA device: use --device cpu")
    if device.type == "cuda" and _index(device) >= len(machine.cuda_capabilities):
        last = len(machine.cuda_capabilities) - 1
        raise DeviceError(
            f"--device {name} was asked for, but the last CUDA device is cuda:{last}: use that or a lower number"
        )
    return device


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
        has, needs = (".".join(map(str, each)) for each in (capability, _FP8_CAPABILITY))
        raise DeviceError(
            f"{flag} fp8 needs compute capability {needs}, and {choice.device} has {has}: give {flag} auto"
        )
