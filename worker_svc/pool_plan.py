"""How many blocks the KV pool gets, and how long a sequence may then be."""

from dataclasses import dataclass

from worker_svc.kv_pool import PoolSizeError, gib, num_pool_blocks
from worker_svc.option_check import pool_too_small


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """The size that was asked for: in blocks, in bytes, or as part of the free memory."""

    num_blocks: int | None
    memory_bytes: int | None
    fraction: float | None
    default_fraction: float  # if nothing is asked for; then the pool is also no larger than can be used
    default_least_tokens: int = 0  # nor smaller than this, where the free memory holds so many at all
    num_host_blocks: int = 0  # of the swap pool, beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLimits:
    """What the pool is for."""

    num_slots: int
    block_size: int
    model_len: int  # the longest sequence of the model
    max_model_len: int | None  # as asked for


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool that can be made."""

    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """What is there to be taken, in bytes."""

    device: int
    host: int | None = None  # beside a device, where the host pool is pinned; None: the device is the host


def plan_pool(request: PoolRequest, sequences: SequenceLimits, free: FreeMemory, bytes_per_block: int) -> PoolPlan:
    """Settles both sizes. Raises PoolSizeError if they do not fit together.

    The host pool is as large as asked for; where the device is the host, the KV pool gets its part of what is left.

    If no longest sequence was asked for, it is the model's, even if the pool holds less: what fits, the scheduler
    decides for each request.
    """
    longest = longest_sequence(sequences)
    left_bytes = _bytes_beside_host_pool(request.num_host_blocks, free, bytes_per_block)
    try:
        num_blocks = _num_blocks(request, sequences, longest, left_bytes, bytes_per_block)
    except PoolSizeError as error:
        if left_bytes == free.device:
            raise
        raise PoolSizeError(f"{error}, beside {request.num_host_blocks} host blocks") from error
    wanted = sequences.max_model_len
    if wanted is not None and num_blocks * sequences.block_size < wanted:
        raise PoolSizeError(pool_too_small(num_blocks, sequences.block_size, wanted))
    return PoolPlan(num_blocks, longest)


def longest_sequence(sequences: SequenceLimits) -> int:
    """In tokens, whatever the pool holds. Raises PoolSizeError if the model has no positions for it."""
    wanted = sequences.max_model_len
    if wanted is not None and wanted > sequences.model_len:
        raise PoolSizeError(
            f"max_model_len is {wanted}, and the model's positions end at {sequences.model_len}: "
            f"give at most --max-model-len {sequences.model_len}"
        )
    return wanted or sequences.model_len


def _bytes_beside_host_pool(num_host_blocks: int, free: FreeMemory, bytes_per_block: int) -> int:
    """What the device has left for the KV pool."""
    wanted = num_host_blocks * bytes_per_block
    host_bytes, taken = free.device, wanted
    if free.host is not None:  # pinned memory, which torch takes from the host in powers of two
        host_bytes, taken = _floor_to_power_of_2(free.host), _floor_to_power_of_2(2 * wanted - 1)
    if taken > host_bytes:
        raise PoolSizeError(
            f"{num_host_blocks} host blocks of {bytes_per_block:,} bytes need {gib(taken)}, and "
            f"{gib(free.device if free.host is None else free.host)} of the host's memory are free: "
            f"give at most --num-host-blocks {host_bytes // bytes_per_block}"
        )
    return free.device - wanted if free.host is None else free.device


def _floor_to_power_of_2(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def _num_blocks(
    request: PoolRequest, sequences: SequenceLimits, longest: int, free_bytes: int, bytes_per_block: int
) -> int:
    num_blocks = request.num_blocks
    if request.memory_bytes is not None:
        num_blocks = request.memory_bytes // bytes_per_block
        if num_blocks < 1:
            raise PoolSizeError(f"kv_memory_bytes must be at least the {bytes_per_block} bytes of one block")
    fraction = request.fraction or request.default_fraction
    if num_blocks is None and request.fraction is None:
        least = -(-min(longest + 1, request.default_least_tokens) // sequences.block_size) * bytes_per_block
        fraction = min(1.0, max(fraction, least / free_bytes)) if free_bytes else fraction
    fitting = num_pool_blocks(
        free_bytes=free_bytes,
        fraction=fraction,
        bytes_per_block=bytes_per_block,
        num_blocks=num_blocks,
    )
    if num_blocks is not None or request.fraction is not None:
        return fitting
    usable = sequences.num_slots * -(-(longest + 1) // sequences.block_size)
    return min(fitting, usable)
