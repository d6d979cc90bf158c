"""Copies whole blocks, all pairs of a step in one launch.

A block holds all layers, so a copy is one contiguous run of bytes. Each program owns a slice of bytes of a group of
pairs: the order of copies, if sources are also destinations, is kept without programs waiting for each other. The torch
references are in `kernels.blocks.kv_blocks`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.blocks.copy_order import CopyTable, copy_table

CHUNK_WORDS = 1024  # of 8 bytes: four 16-byte loads in flight for each of 128 threads
NUM_WARPS = 4
MAX_PROGRAMS = 1 << 20  # one for each slice
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


@triton.jit(do_not_specialize=["num_groups", "num_chunks"])
def copy_kernel(
    source_ptr: tl.tensor,  # [num_source_blocks, num_words]
    destination_ptr: tl.tensor,  # [num_destination_blocks, num_words], may be the source
    table_ptr: tl.tensor,  # int64 [num_groups + 1 + 2 * num_pairs]: first pair of each group, then the pairs
    num_words: tl.tensor,
    num_groups: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """destination[d] = source[s] for the pairs (s, d) of one group, in one slice of the block; then the next slice.

    The first source is read before, and written after, all other copies (`copy_groups`). Barriers order the readers of
    a source before its writer; no other program of the group touches the slice.
    """
    o_chunk = tl.arange(0, CHUNK)
    p_pairs = table_ptr + num_groups + 1
    for i_slice in range(tl.program_id(0), num_groups * num_chunks, tl.num_programs(0)):
        i_group, i_chunk = i_slice // num_chunks, i_slice % num_chunks
        o_word = i_chunk.to(tl.int64) * CHUNK + o_chunk
        m_word = o_word < num_words
        i_first = tl.load(table_ptr + i_group)
        i_end = tl.load(table_ptr + i_group + 1)
        b_held = tl.load(source_ptr + tl.load(p_pairs + 2 * i_first) * num_words + o_word, mask=m_word, other=0)
        for i_pair in range(i_first + 1, i_end):
            i_source = tl.load(p_pairs + 2 * i_pair)
            i_destination = tl.load(p_pairs + 2 * i_pair + 1)
            b_words = tl.load(source_ptr + i_source * num_words + o_word, mask=m_word, other=0)
            tl.debug_barrier()
            tl.store(destination_ptr + i_destination * num_words + o_word, b_words, mask=m_word)
        tl.debug_barrier()
        i_destination = tl.load(p_pairs + 2 * i_first + 1)
        tl.store(destination_ptr + i_destination * num_words + o_word, b_held, mask=m_word)


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks, all layers at once: `pool[destination] = pool[source]` for each pair.

    Every source is read before any destination is written, so a block may be a source of one pair and the
    destination of another. No destination may occur twice. Queues one copy of the pairs and one launch.

    pool:  [num_blocks, ...], block first, contiguous
    pairs: [P, 2] int64, (source, destination), on the CPU
    """
    table = copy_table(pairs.numpy())
    copy_by_table(pool, pool, table_on(pool.device, table), table.num_groups)


def copy_by_table(source: Tensor, destination: Tensor, table: Tensor, num_groups: int) -> None:
    """Copy groups of pairs from one pool to another or to itself, in a single launch.

    source, destination: [num_blocks, ...], contiguous, of equal blocks, on the device
    table:               int64 [num_groups + 1 + 2 * num_pairs] in the layout of `copy_table`, on the device
    """
    launch_copies(source, destination, table, num_groups, MAX_PROGRAMS)


def launch_copies(source: Tensor, destination: Tensor, table: Tensor, num_groups: int, max_programs: int) -> None:
    """Launch `copy_by_table` with at most `max_programs`; one of the pools may be pinned memory of the host.

    Torch's pinned memory is mapped into the device's address space, where Triton's launcher finds its address, and a
    kernel reads and writes it across the bus.
    """
    if num_groups == 0:
        return
    assert table.is_contiguous() and table.dtype == torch.int64
    source_words, destination_words = _as_words(source), _as_words(destination)
    num_words = source_words.shape[1]
    num_chunks = triton.cdiv(num_words, CHUNK_WORDS)
    copy_kernel[(min(num_groups * num_chunks, max_programs),)](
        source_words,
        destination_words,
        table,
        num_words,
        num_groups,
        num_chunks,
        CHUNK=CHUNK_WORDS,
        num_warps=NUM_WARPS,
        num_stages=1,  # keep the order of loads and stores
        enable_fp_fusion=True,
    )


def table_on(device: torch.device, table: CopyTable) -> Tensor:
    """The table on a device, for callers without an upload of their own; queued on the current stream."""
    array = torch.from_numpy(table.array)
    return (array.pin_memory() if device.type == "cuda" else array).to(device, non_blocking=True)


def _as_words(pool: Tensor) -> Tensor:
    """View blocks as rows of the widest integers that divide them: [num_blocks, num_words]."""
    assert pool.is_contiguous(), "a block must be one run of bytes"
    rows = pool.view(len(pool), -1)
    block_bytes = rows.shape[1] * rows.element_size()
    return rows.view(next(word for word in _WORDS if block_bytes % word.itemsize == 0))
