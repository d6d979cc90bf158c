"""Checks the configured KV pool against a model, and its weights against the machine, before torch is loaded.

If only torch can tell the dtype of the blocks, the check is left to `pool_plan`. Does not look at the free memory.
"""

from collections.abc import Iterable
from math import prod

from kernels.native.processor import multiplies_bfloat16, processor_features
from worker_svc.checkpoint.dtype_choice import choose_dtype
from worker_svc.memory.pool_plan import PoolRequest, PoolSizeError, SequenceLimits, asked_blocks, check_asked_pool, gib
from worker_svc.model.config import ModelConfig
from worker_svc.model.model_part import rank_config
from worker_svc.model.tensor_names import NeededTensor
from worker_svc.option_check import CheckedOptions, OptionError, is_on_cuda

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
_SCALE_BYTES = 4  # for the key, or the value, of a token in one head, in int8


def check_pool(options: CheckedOptions, config: ModelConfig, saved_dtype: str, *, has_driver: bool) -> None:
    """Raises OptionError if the configured pool holds less than one block, or than the longest sequence.

    Also if it is larger than all the memory that the worker may take.
    """
    kept = kept_dtype(options, saved_dtype, has_driver=has_driver)
    if kept is None:
        return
    request = PoolRequest(
        num_blocks=options.num_blocks,
        memory_bytes=options.kv_memory_bytes,
        fraction=None,
        default_fraction=1.0,
    )
    sequences = SequenceLimits(
        num_seats=1,
        block_size=options.block_size,
        model_len=config.max_model_len,
        max_model_len=options.max_model_len,
    )
    num_ranks = options.tensor_parallel
    block_bytes = num_ranks * bytes_per_block(rank_config(config, num_ranks), options.block_size, kept)
    check_asked_pool(request, sequences, block_bytes)
    if is_on_cuda(options, has_driver=has_driver) is False:
        _check_share(options, block_bytes)


def check_weights(
    options: CheckedOptions, tensors: Iterable[NeededTensor], saved_dtype: str, *, has_driver: bool, memory_bytes: int
) -> None:
    """Raises OptionError if the weights of a worker on a CPU are more than all memory: the system would kill it."""
    if is_on_cuda(options, has_driver=has_driver) is not False:
        return
    bfloat16_by = multiplies_bfloat16(processor_features())
    dtype = choose_dtype(options.dtype, saved_dtype, on_cpu=True, bfloat16_by=bfloat16_by).dtype
    of_vector = of_matrix = _BYTES[dtype]
    if options.weight_dtype == "int8":
        of_matrix = _BYTES["int8"]
    needed = sum(prod(each.shape) * (of_matrix if len(each.shape) > 1 else of_vector) for each in tensors)
    if options.group_address is not None:  # each rank has a machine for itself
        needed //= options.tensor_parallel
    if needed <= memory_bytes:
        return
    remedies = ["--dtype bfloat16"] * (dtype == "float32") + ["--weight-dtype int8"] * (options.weight_dtype == "auto")
    give = f"give {' or '.join(remedies)}, or a smaller model" if remedies else "give a smaller model"
    raise OptionError(
        f"the weights need {gib(needed)} of main memory in {options.weight_dtype if of_matrix == 1 else dtype}, "
        f"and this machine, or container, has {gib(memory_bytes)}: {give}"
    )


def _check_share(options: CheckedOptions, block_bytes: int) -> None:
    """Raises PoolSizeError if the pool alone takes more than the worker may take in all."""
    asked = asked_blocks(options.num_blocks, options.kv_memory_bytes, block_bytes)
    if asked is None or options.memory_bytes is None or asked * block_bytes <= options.memory_bytes:
        return
    what = f"--num-blocks {options.num_blocks}"
    if options.kv_memory_bytes is not None:
        what = f"--kv-memory-bytes {options.kv_memory_bytes}"
    raise PoolSizeError(
        f"{what} is a pool of {asked * block_bytes} bytes, more than the --memory-bytes {options.memory_bytes} that "
        "weights, steps and KV pool of a worker may take together: give a smaller pool"
    )


def kept_dtype(options: CheckedOptions, saved_dtype: str, *, has_driver: bool) -> str | None:
    """Name of the dtype in which keys and values will be kept; None if only torch can tell."""
    if options.kv_dtype != "auto":
        return options.kv_dtype
    on_cuda = is_on_cuda(options, has_driver=has_driver)
    bfloat16_by = multiplies_bfloat16(processor_features())
    on_either = {
        choose_dtype(options.dtype, saved_dtype, on_cpu=on_cpu, bfloat16_by=bfloat16_by).dtype
        for on_cpu in (True, False)
        if on_cuda is not on_cpu
    }
    return on_either.pop() if len(on_either) == 1 else None


def bytes_per_block(config: ModelConfig, block_size: int, kept: str) -> int:
    """Size of one block: keys and values in all layers, in the layout of `BlockShape`."""
    row_bytes = config.head_dim * _BYTES[kept] + (_SCALE_BYTES if kept == "int8" else 0)
    return config.num_layers * 2 * block_size * config.num_kv_heads * row_bytes
