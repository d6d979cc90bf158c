"""Plans the KV pool: its number of blocks, and the longest sequence. Pure, and without torch.

Errors name the options that were given; the size of the free memory is passed in.
"""

from dataclasses import dataclass

from worker_svc.option_check import OptionError, blocks_too_few, check_length, pool_too_small

MOST_BLOCKS = 1 << 22  # of a pool, however large the memory: schedulers refuse more
_SMALL = 1 << 27  # bytes; sizes from here on are shown in GiB


class PoolSizeError(OptionError):
    """The free memory does not hold the pool that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """The size that was asked for: in blocks, in bytes, or as part of the free memory."""

    num_blocks: int | None
    memory_bytes: int | None
    fraction: float | None
    default_fraction: float  # if no size is asked for; then the pool is also no larger than all sequences can use
    default_least_tokens: int = 0  # nor smaller than this, if the free memory holds so many
    num_host_blocks: int = 0  # of the swap pool, beside it
    share: int | None = None  # bytes that the worker may take in all, if that was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLimits:
    """Number and length of the sequences that the pool is for."""

    num_seats: int
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
    """Free memory in bytes."""

    device: int
    host: int | None = None  # main memory for the pinned host pool of a GPU; None: the device is the CPU


def plan_pool(request: PoolRequest, sequences: SequenceLimits, free: FreeMemory, bytes_per_block: int) -> PoolPlan:
    """Chooses both sizes. Raises OptionError if they do not fit together.

    The host pool is as large as asked for; on a CPU the KV pool gets its part of the rest.

    The default of the longest sequence is the model's, even if the pool holds less: the scheduler decides for each
    request if it fits.
    """
    longest = longest_sequence(sequences)
    left_bytes = _bytes_beside_host_pool(request.num_host_blocks, free, bytes_per_block)
    try:
        num_blocks = _num_blocks(request, sequences, longest, left_bytes, bytes_per_block)
    except PoolSizeError as error:
        if left_bytes == free.device:
            raise
        raise PoolSizeError(f"{error}, beside --num-host-blocks {request.num_host_blocks}") from error
    wanted = sequences.max_model_len
    if wanted is not None and num_blocks * sequences.block_size < wanted:
        raise PoolSizeError(_too_small(request, num_blocks, sequences.block_size, wanted, bytes_per_block))
    return PoolPlan(num_blocks, longest)


def longest_sequence(sequences: SequenceLimits) -> int:
    """Longest sequence in tokens, whatever the pool holds. Raises OptionError if the model has too few positions."""
    check_length(sequences.max_model_len, sequences.model_len)
    return sequences.max_model_len or sequences.model_len


def asked_blocks(num_blocks: int | None, memory_bytes: int | None, bytes_per_block: int) -> int | None:
    """Number of blocks that was asked for, in blocks or in bytes; None if no size was.

    Raises PoolSizeError for fewer bytes than one block has.
    """
    if memory_bytes is None:
        return num_blocks
    if memory_bytes < bytes_per_block:
        raise PoolSizeError(
            f"--kv-memory-bytes {memory_bytes} is less than the {bytes_per_block} bytes of one block: "
            f"give at least --kv-memory-bytes {bytes_per_block}, or a smaller --block-size"
        )
    return min(memory_bytes // bytes_per_block, MOST_BLOCKS)


def check_asked_pool(request: PoolRequest, sequences: SequenceLimits, bytes_per_block: int) -> None:
    """Checks a request as far as possible without the size of the free memory. Raises PoolSizeError."""
    num_blocks = asked_blocks(request.num_blocks, request.memory_bytes, bytes_per_block)
    wanted = sequences.max_model_len
    if num_blocks is not None and wanted is not None and num_blocks * sequences.block_size < wanted:
        raise PoolSizeError(_too_small(request, num_blocks, sequences.block_size, wanted, bytes_per_block))


def gib(num_bytes: int) -> str:
    """Format bytes as GiB."""
    return f"{num_bytes / 2**30:.2f} GiB"


def _bytes_beside_host_pool(num_host_blocks: int, free: FreeMemory, bytes_per_block: int) -> int:
    """Bytes that the device has left for the KV pool."""
    wanted = num_host_blocks * bytes_per_block
    host_bytes, taken = free.device, wanted
    if free.host is not None:  # pinned memory, which torch takes from the host in powers of two
        host_bytes, taken = _floor_to_power_of_2(free.host), _floor_to_power_of_2(2 * wanted - 1)
    if taken > host_bytes:
        raise PoolSizeError(
            f"--num-host-blocks {num_host_blocks} of {bytes_per_block:,} bytes each need {_size(taken)}, and "
            f"{_size(free.device if free.host is None else free.host)} of the main memory are free: "
            f"give at most --num-host-blocks {host_bytes // bytes_per_block}"
        )
    return free.device - wanted if free.host is None else free.device


def _floor_to_power_of_2(number: int) -> int:
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def _num_blocks(
    request: PoolRequest, sequences: SequenceLimits, longest: int, free_bytes: int, bytes_per_block: int
) -> int:
    asked = asked_blocks(request.num_blocks, request.memory_bytes, bytes_per_block)
    if asked is not None:
        if asked * bytes_per_block > free_bytes:
            raise PoolSizeError(_too_large(request, free_bytes, bytes_per_block))
        return asked
    if request.fraction is not None:
        return _fitting(request, request.fraction, free_bytes, bytes_per_block)
    least = -(-min(longest + 1, request.default_least_tokens) // sequences.block_size) * bytes_per_block
    fraction = request.default_fraction
    fraction = min(1.0, max(fraction, least / free_bytes)) if free_bytes else fraction
    usable = sequences.num_seats * -(-(longest + 1) // sequences.block_size)
    return min(_fitting(request, fraction, free_bytes, bytes_per_block), usable)


def _fitting(request: PoolRequest, fraction: float, free_bytes: int, bytes_per_block: int) -> int:
    """Number of blocks in this part of the free memory, at least one. Raises PoolSizeError."""
    fitting = int(free_bytes * fraction) // bytes_per_block
    if fitting >= 1:
        return min(fitting, MOST_BLOCKS)
    needs = f"one block of the KV pool needs {bytes_per_block:,} bytes, and"
    free = f"{_size(free_bytes)} that are free"
    if request.fraction is not None:
        why = f"--kv-memory-fraction {fraction:g} of the {free} is less: give a larger --kv-memory-fraction"
    elif request.share is not None:
        why = f"--memory-bytes {request.share} leaves {_size(free_bytes)} beside weights and steps: give more of them"
    else:
        why = f"its part of the {free} is less: free memory, or give a smaller --block-size"
    raise PoolSizeError(f"{needs} {why}")


def _too_large(request: PoolRequest, free_bytes: int, bytes_per_block: int) -> str:
    """Message for a pool that is larger than the free memory."""
    most = free_bytes // bytes_per_block
    if request.memory_bytes is not None:
        what, remedy = f"--kv-memory-bytes {request.memory_bytes} are", f"give at most --kv-memory-bytes {free_bytes}"
    else:
        num_blocks = request.num_blocks or 0
        what = f"--num-blocks {num_blocks} of {bytes_per_block:,} bytes each are {_size(num_blocks * bytes_per_block)},"
        remedy = f"give at most --num-blocks {most}"
    return f"{what} more than the {_size(free_bytes)} that are free: {remedy if most else 'free memory'}"


def _too_small(request: PoolRequest, num_blocks: int, block_size: int, max_model_len: int, bytes_per_block: int) -> str:
    """Message for a pool that holds less than one sequence."""
    if request.num_blocks is not None:
        return blocks_too_few(num_blocks, block_size, max_model_len)
    if request.memory_bytes is not None:
        pool = f"--kv-memory-bytes {request.memory_bytes}"
        remedy = f"give --kv-memory-bytes {-(-max_model_len // block_size) * bytes_per_block} or more"
    elif request.fraction is not None:
        pool, remedy = f"--kv-memory-fraction {request.fraction:g}", "give a larger one"
    else:
        pool, remedy = "the free memory", "free some"
    return pool_too_small(pool, remedy, num_blocks * block_size, max_model_len)


def _size(num_bytes: int) -> str:
    """Format bytes, those of small sizes exactly."""
    return gib(num_bytes) if num_bytes >= _SMALL else f"{num_bytes:,} bytes"
