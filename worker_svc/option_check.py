"""Checks options against the machine, as far as possible before torch is imported.

Options that only torch can check, such as the number of a CUDA device, `runner_choice` checks later, with the same
messages. Messages name options by their flags; the caller that shows them uses the typed names (`quire.typed_names`).
"""

import ctypes
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Self

FP8_WEIGHTS_NEED_16_BITS = (
    "--weight-dtype fp8 makes products of 16 bits on a GPU, and the model computes in float32: give --dtype bfloat16"
)
# Modules of the attention libraries, by their names for --attention; one of them is enough.
_ATTENTION_MODULES = {"flashinfer": ("flashinfer",), "flash-attn": ("flash_attn_interface", "flash_attn_3")}
_ATTENTION_REMEDIES = {
    "flashinfer": "FlashInfer, which is not installed: run pip install '.[flashinfer]' in a clone of Quire",
    "flash-attn": "FlashAttention-3 (the module flash_attn_interface; flash_attn alone is FlashAttention-2), which is "
    "not installed: install it as the folder hopper of its sources says",
}
DEVICE_DTYPES = ("fp8", "int4")  # of keys, values and weights: with the runner of an accelerator alone
_AMD_DRIVER = Path("/dev/kfd")  # some builds of torch offer AMD devices as `cuda`
_NO_DEVICE = 100  # what NVIDIA's driver says without one


class OptionError(ValueError):
    """Options that this machine, the model or other options do not allow; the message says what to do."""


class DeviceError(OptionError):
    """A setting needs a device or a package that is missing; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedOptions:
    """Settings of a worker that are checked here, under the names that `WorkerSettings` gives them."""

    device: str
    runner: str
    dtype: str
    kv_dtype: str
    weight_dtype: str
    kernels: str
    block_size: int
    num_blocks: int | None
    kv_memory_bytes: int | None
    memory_bytes: int | None
    max_model_len: int | None
    tensor_parallel: int = 1
    group_address: str | None = None
    rank: int | None = None
    attention: str = "auto"
    worker_number: int = 0

    @classmethod
    def of(cls, settings: object) -> Self:
        """Copy the fields of `WorkerSettings`."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})


def has_cuda_driver() -> bool:
    """True if a driver is installed that can provide `cuda` devices."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _AMD_DRIVER.exists()
    return True


def num_cuda_devices() -> int | None:
    """Number of CUDA devices that this process may use, as NVIDIA's driver counts them; None if it does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    status, count = driver.cuInit(0), ctypes.c_int()
    if status == _NO_DEVICE:
        return 0
    return None if status or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def has_triton() -> bool:
    """True if Triton is installed."""
    return find_spec("triton") is not None


def installed_attention() -> tuple[str, ...]:
    """Names of the attention libraries that are installed, of which none is imported."""
    return tuple(name for name, modules in _ATTENTION_MODULES.items() if any(map(find_spec, modules)))


def is_on_cuda(options: CheckedOptions, *, has_driver: bool) -> bool | None:
    """True if the device will be a CUDA device; None if only torch can tell."""
    if options.device == "auto":
        return None if has_driver else False
    return options.device.startswith("cuda")


def may_take_int8(runner: str, kernels: str, dtype: str) -> bool:
    """True if, on a CPU, numbers may have int8 with these options, wherever native kernels are at hand."""
    return runner != "device" and kernels != "torch" and dtype != "float16"


def check_options(
    options: CheckedOptions,
    *,
    has_driver: bool,
    has_kernels: bool,
    libraries: Collection[str] = (),
    count_devices: Callable[[], int | None] = lambda: None,
) -> None:
    """Raises OptionError. Options that depend on devices which only torch can list pass.

    `libraries`: those of attention that are installed. `count_devices`: number of CUDA devices, or None; called only if
    a group needs several, since it takes a moment.
    """
    if options.device.startswith("cuda") and not has_driver:
        raise OptionError(
            f"--device {options.device} was asked for, but there is no CUDA driver (libcuda.so.1 cannot be loaded): "
            "install NVIDIA's driver, give the container its GPU, or use --device cpu"
        )
    on_cuda = is_on_cuda(options, has_driver=has_driver)
    kind = options.runner
    if kind == "auto" and on_cuda is not None:
        kind = "device" if on_cuda else "cpu"
    if on_cuda and kind == "cpu":
        raise OptionError(cpu_runner_refused(options.device))
    if on_cuda and not has_kernels:
        raise OptionError(kernels_missing(options.device))
    if on_cuda is False and options.attention != "auto":
        raise OptionError(attention_refused(options.attention, "cpu"))
    if options.attention in _ATTENTION_MODULES and options.attention not in libraries:
        raise OptionError(attention_missing(options.attention))
    if kind == "cpu":
        _check_no_device_dtypes(options)
    if on_cuda and (options.weight_dtype, options.dtype) == ("fp8", "float32"):
        raise OptionError(FP8_WEIGHTS_NEED_16_BITS)
    if options.tensor_parallel > 1 and options.group_address is None and on_cuda is not False and kind != "cpu":
        _check_devices(options, count_devices())
    _check_int8(options, is_on_host=kind == "cpu" and on_cuda is False, is_elsewhere=bool(on_cuda) or kind == "device")
    num_blocks, max_model_len = options.num_blocks, options.max_model_len
    if num_blocks is not None and max_model_len is not None and num_blocks * options.block_size < max_model_len:
        raise OptionError(blocks_too_few(num_blocks, options.block_size, max_model_len))


def check_length(max_model_len: int | None, model_len: int) -> None:
    """Raises OptionError if `max_model_len` is more than the model's positions."""
    if max_model_len is not None and max_model_len > model_len:
        raise OptionError(
            f"--max-model-len {max_model_len} is more than the {model_len} positions of the model: "
            f"give at most --max-model-len {model_len}, or, if its rotary embeddings are made for more, a larger "
            "max_position_embeddings in config.json"
        )


def kernels_missing(device: object) -> str:
    """Message for steps on a CUDA device without Triton, which compiles the kernels."""
    return (
        f"on {device} steps are computed by Triton kernels, and Triton is missing: run pip install "
        "'.[gpu]' in a clone of Quire, or give --device cpu"
    )


def attention_missing(name: str) -> str:
    """Message for an attention library that is not installed."""
    return f"--attention {name} needs {_ATTENTION_REMEDIES[name]}, or leave --attention out"


def attention_refused(name: str, device: object) -> str:
    """Message for a choice of attention kernels on another device than a CUDA device."""
    return (
        f"--attention {name} chooses kernels of a CUDA device, and steps are computed on {device}: leave --attention "
        "out, or give --device cuda"
    )


def cpu_runner_refused(device: object) -> str:
    """Message for the CPU's runner on another device."""
    return f"--runner cpu computes on the CPU alone, and --device is {device}: leave --runner out, or give --device cpu"


def device_number(first: int, *, worker_number: int, num_ranks: int, num_devices: int) -> int:
    """Number of the CUDA device of a worker's rank 0, where worker 0 of the machine begins at `first`, which is there.

    Workers of one rank take turns if there are too few devices. Groups do not share devices: raises DeviceError if
    there are none left for one.
    """
    turn = worker_number % (num_devices - first) if num_ranks == 1 else worker_number
    number = first + turn * num_ranks
    if number + num_ranks > num_devices:
        raise DeviceError(_devices_too_few(num_ranks, number, num_devices, worker_number))
    return number


def _devices_too_few(num_ranks: int, first: int, num_devices: int, worker_number: int) -> str:
    """Message for a group that takes a CUDA device for each of its ranks, from number `first` on."""
    most = num_devices - first
    if worker_number:
        remedy = f"give --workers {worker_number} or less, or less --tensor-parallel"
    else:
        remedy = f"give at most --tensor-parallel {most}" if most > 1 else "leave it out"
    return (
        f"--tensor-parallel {num_ranks} takes a CUDA device for each rank, cuda:{first} to "
        f"cuda:{first + num_ranks - 1}, and the last one is cuda:{num_devices - 1}: {remedy}, or start the ranks on "
        "several machines with --rank and --group-address"
    )


def device_runner_needed(flag: str, dtype: str) -> str:
    """Message for `flag` with a dtype that only the runner of an accelerator computes."""
    return f"{flag} {dtype} needs the runner of an accelerator: leave it out, or give --runner device"


def int8_refused(flag: str) -> str:
    """Message for `flag` int8 with another runner than the CPU's."""
    return f"{flag} int8 needs the CPU's runner: leave it out, or give --device cpu and --runner cpu"


def int8_needs_kernels(flag: str, why_none: str) -> str:
    """Message for `flag` int8 without native kernels."""
    return f"{flag} int8 needs native kernels, and {why_none}: correct that, or leave {flag} int8 out"


def blocks_too_few(num_blocks: int, block_size: int, max_model_len: int) -> str:
    """Message for a number of blocks that hold less than one sequence."""
    remedy = f"give --num-blocks {-(-max_model_len // block_size)} or more"
    return pool_too_small(
        f"--num-blocks {num_blocks} of {block_size} tokens each", remedy, num_blocks * block_size, max_model_len
    )


def pool_too_small(pool: str, remedy: str, held: int, max_model_len: int) -> str:
    """Message for a pool that holds less than one sequence."""
    return (
        f"{pool} holds {held} tokens, less than one sequence of --max-model-len {max_model_len}: {remedy}, "
        f"or --max-model-len {held} or less"
    )


def _check_devices(options: CheckedOptions, num_devices: int | None) -> None:
    """Raises OptionError if there are too few CUDA devices for a group on one machine; without any it is on CPUs."""
    first, num_ranks = int(options.device.partition(":")[2] or 0), options.tensor_parallel
    if num_devices and first < num_devices:
        device_number(first, worker_number=options.worker_number, num_ranks=num_ranks, num_devices=num_devices)


def _check_no_device_dtypes(options: CheckedOptions) -> None:
    """Raises OptionError for a dtype that the CPU's runner does not compute."""
    for flag, dtype in _dtypes(options):
        if dtype in DEVICE_DTYPES:
            raise OptionError(device_runner_needed(flag, dtype))


def _check_int8(options: CheckedOptions, *, is_on_host: bool, is_elsewhere: bool) -> None:
    """Raises OptionError. `is_on_host`: the CPU's runner computes; `is_elsewhere`: another one; neither: unknown."""
    for flag, dtype in _dtypes(options):
        if dtype != "int8":
            continue
        if is_elsewhere:
            raise OptionError(int8_refused(flag))
        if is_on_host and options.kernels == "torch":
            told = "--kernels torch was given: leave one of them out"
            raise OptionError(f"{flag} int8 needs native kernels, and {told}")
        if is_on_host and options.dtype == "float16":
            raise OptionError(
                f"{flag} int8 needs native kernels, and there are none for --dtype float16: "
                "give --dtype bfloat16 or float32"
            )


def _dtypes(options: CheckedOptions) -> tuple[tuple[str, str], ...]:
    """Flags that give the dtype of keys and values, and of weights, with their values."""
    return ("--kv-dtype", options.kv_dtype), ("--weight-dtype", options.weight_dtype)
