"""Checks what options ask of the machine, as far as that can be told before torch is imported.

What only torch knows, such as which CUDA devices there are, `runner_choice` refuses later, in the same words.
"""

import ctypes
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

FP8_KV_REFUSED = "--kv-dtype fp8 is for the runner of an accelerator alone: leave it out, or give --runner device"
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
        raise OptionError(kernels_missing(options.device))
    if options.kv_dtype == "fp8" and kind == "cpu":
        raise OptionError(FP8_KV_REFUSED)
    if on_cuda or kind == "device":
        _check_int8(options)
    _check_pool(options)


def kernels_missing(device: object) -> str:
    """What is said where steps would be computed on a CUDA device, and nothing can compile kernels for it."""
    return (
        f"on {device} steps are computed by Triton kernels, and Triton is missing: run pip install "
        "'.[gpu]' in a clone of Quire, or give --runner cpu, which is slow"
    )


def int8_refused(flag: str) -> str:
    """What is said of int8 that was asked for by a flag where the CPU's own runner does not compute."""
    return f"{flag} int8 is for the CPU's own runner alone: leave it out, or give --device cpu and --runner cpu"


def pool_too_small(num_blocks: int, block_size: int, max_model_len: int) -> str:
    """What is said of a pool that holds less than one sequence."""
    held = num_blocks * block_size
    return (
        f"a pool of {num_blocks} blocks holds {held} tokens, less than one sequence of max_model_len {max_model_len}: "
        f"give --num-blocks {-(-max_model_len // block_size)} or more, or --max-model-len {held} or less"
    )


def _check_int8(options: CheckedOptions) -> None:
    for flag, dtype in (("--kv-dtype", options.kv_dtype), ("--weight-dtype", options.weight_dtype)):
        if dtype == "int8":
            raise OptionError(int8_refused(flag))


def _check_pool(options: CheckedOptions) -> None:
    num_blocks, max_model_len = options.num_blocks, options.max_model_len
    if num_blocks is None or max_model_len is None:
        return
    if num_blocks * options.block_size < max_model_len:
        raise OptionError(pool_too_small(num_blocks, options.block_size, max_model_len))
