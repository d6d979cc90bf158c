"""Checks what options ask of the machine, as far as that can be told before torch is imported.

What only torch knows, such as which CUDA devices there are, `runner_choice` refuses later.
"""

import ctypes
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_AMD_DRIVER = Path("/dev/kfd")  # with which some builds of torch offer `cuda` devices


class OptionError(ValueError):
    """Options that this machine, or other options, do not allow; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedOptions:
    """Settings of a worker that are checked here, by their names there."""

    device: str
    runner: str
    kv_dtype: str
    weight_dtype: str
    block_size: int
    num_blocks: int | None
    max_model_len: int | None


def has_cuda_driver() -> bool:
    """Whether a driver is here that CUDA devices could come from."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _AMD_DRIVER.exists()
    return True


def has_triton() -> bool:
    """Whether the library of the kernels is installed."""
    return find_spec("triton") is not None


def check_options(options: CheckedOptions, *, has_driver: bool, has_kernels: bool) -> None:
    """Raises OptionError; what depends on devices that may be there passes."""
    if options.device.startswith("cuda") and not has_driver:
        raise OptionError(
            f"--device {options.device} was asked for, and no CUDA driver is here (libcuda.so.1 cannot be loaded): "
            "install NVIDIA's driver, give the container its GPU, or use --device cpu"
        )
    on_cuda = options.device.startswith("cuda") or (None if options.device == "auto" and has_driver else False)
    kind = options.runner
    if kind == "auto" and on_cuda is not None:
        kind = "device" if on_cuda else "cpu"
    if on_cuda and kind == "device" and not has_kernels:
        raise OptionError(
            f"on {options.device} steps are computed by Triton kernels, and Triton is missing: run pip install "
            "'.[gpu]' in a clone of Quire, or give --runner cpu, which is slow"
        )
    if options.kv_dtype == "fp8" and kind == "cpu":
        raise OptionError(
            "--kv-dtype fp8 is for the runner of an accelerator alone: leave it out, or give --runner device"
        )
    if on_cuda or kind == "device":
        _check_int8(options)
    _check_pool(options)


def _check_int8(options: CheckedOptions) -> None:
    if options.kv_dtype == "int8":
        raise OptionError(
            "--kv-dtype int8 is for the CPU's own runner alone: leave it out, or give --device cpu and --runner cpu"
        )
    if options.weight_dtype == "int8":
        raise OptionError(
            "--weight-dtype int8 is for the CPU's own runner alone: leave it out, or give --device cpu and --runner cpu"
        )


def _check_pool(options: CheckedOptions) -> None:
    if options.num_blocks is None or options.max_model_len is None:
        return
    held = options.num_blocks * options.block_size
    if held < options.max_model_len:
        raise OptionError(
            f"a pool of {options.num_blocks} blocks holds {held} tokens, less than one sequence of max_model_len "
            f"{options.max_model_len}: give --num-blocks {-(-options.max_model_len // options.block_size)} or more, or "
            f"--max-model-len {held} or less"
        )
