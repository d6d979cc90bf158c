"""Checks the size of the KV pool that options ask for against a model, before torch and any weight are loaded.

Where only torch can tell in which dtype blocks are kept, it leaves the check to `pool_plan`. It looks at no memory.
"""

from kernels.native.processor import multiplies_bfloat16, processor_features
from worker_svc.checkpoint.dtype_choice import choose_dtype
from worker_svc.memory.pool_plan import PoolRequest, SequenceLimits, check_asked_pool
from worker_svc.model.config import ModelConfig
from worker_svc.option_check import CheckedOptions, is_on_cuda

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
_SCALE_BYTES = 4  # of a token's key, or value, of one head in int8


def check_pool(options: CheckedOptions, config: ModelConfig, saved_dtype: str, *, has_driver: bool) -> None:
    """Raises OptionError if the pool that was asked for is less than a block, or than the longest sequence."""
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
        num_slots=1,
        block_size=options.block_size,
        model_len=config.max_model_len,
        max_model_len=options.max_model_len,
    )
    check_asked_pool(request, sequences, bytes_per_block(config, options.block_size, kept))


def kept_dtype(options: CheckedOptions, saved_dtype: str, *, has_driver: bool) -> str | None:
    """In which dtype keys and values will be kept; None where that depends on what torch finds."""
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
    """Of keys and values in all layers, as `BlockShape` lays them out."""
    row_bytes = config.head_dim * _BYTES[kept] + (_SCALE_BYTES if kept == "int8" else 0)
    return config.num_layers * 2 * block_size * config.num_kv_heads * row_bytes
