"""Checks the configured KV pool against a model, and its weights against the machine, before torch is loaded.

If only torch can tell the dtype of the blocks, the check is left to `pool_plan`. Does not look at the free memory.
"""

from collections.abc import Iterable, Sequence
from math import prod

from kernels.native.processor import multiplies_bfloat16, processor_features
from worker_svc.checkpoint.dtype_choice import choose_dtype
from worker_svc.memory.pool_plan import PoolRequest, PoolSizeError, SequenceLimits, asked_blocks, check_asked_pool, gib
from worker_svc.model.config import ModelConfig
from worker_svc.model.model_part import rank_config
from worker_svc.model.tensor_names import NeededTensor
from worker_svc.option_check import CheckedOptions, OptionError, is_on_cuda, may_take_int8

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
_MATRIX_BITS = {"int8": 8, "fp8": 8, "int4": 4}  # of a number in a matrix, by --weight-dtype; auto: as the dtype
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
    """Raises OptionError if the weights of a worker on a CPU are more than all memory: the system would kill it.

    Ranks on other machines pass: their dtypes are those of rank 0.
    """
    if is_on_cuda(options, has_driver=has_driver) is not False or options.rank:
        return
    bfloat16_by = multiplies_bfloat16(processor_features())
    dtype = choose_dtype(options.dtype, saved_dtype, on_cpu=True, bfloat16_by=bfloat16_by).dtype
    shapes = [each.shape for each in tensors]
    num_parts = 1 if options.group_address is None else options.tensor_parallel  # each with a machine for itself
    needed = _weight_bytes(shapes, dtype, options.weight_dtype) // num_parts
    if needed <= memory_bytes:
        return
    smaller = {"--dtype bfloat16": ("bfloat16", options.weight_dtype)}
    if options.weight_dtype == "auto" and options.runner == "device":
        smaller["--weight-dtype int4"] = (dtype, "int4")
    elif may_take_int8(options.runner, options.kernels, dtype):
        smaller["--weight-dtype int8"] = (dtype, "int8")
    fitting = [flag for flag, each in smaller.items() if _weight_bytes(shapes, *each) // num_parts <= memory_bytes]
    give = f"give {' or '.join(fitting)}, or a smaller model" if fitting else "give a smaller model"
    raise OptionError(
        f"the weights need {gib(needed)} of main memory in "
        f"{dtype if options.weight_dtype == 'auto' else options.weight_dtype}, "
        f"and this machine, or container, has {gib(memory_bytes)}: {give}"
    )


def _weight_bytes(shapes: Sequence[Sequence[int]], dtype: str, weight_dtype: str) -> int:
    """Least size of tensors: with fewer bits some matrices, such as embeddings, stay in the dtype."""
    dtype_bits = 8 * _BYTES[dtype]
    matrix_bits = _MATRIX_BITS.get(weight_dtype, dtype_bits)
    return sum(prod(shape) * (matrix_bits if len(shape) > 1 else dtype_bits) for shape in shapes) // 8


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
