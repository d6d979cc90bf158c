"""Copies blocks and swaps them: the torch references, on any device.

They know block ids and strides; neither owners of blocks nor block tables.
"""

import torch
from torch import Tensor


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks, all layers at once: `pool[destination] = pool[source]` for each pair.

    Every source is read before any destination is written, so a block may be a source of one pair and the
    destination of another. No destination may occur twice.

    pool:  [num_blocks, ...], block first
    pairs: [P, 2] int64, (source, destination), on the CPU
    """
    sources, destinations = pairs.unbind(1)
    if pool.is_cpu and not torch.isin(sources, destinations).any():
        _copy_each(pool, pool, pairs)
        return
    sources, destinations, pool = sources.to(pool.device), destinations.to(pool.device), _indexable(pool)
    pool.index_copy_(0, destinations, pool.index_select(0, sources))


def copy_by_table(source: Tensor, destination: Tensor, table: Tensor, num_groups: int) -> None:
    """Copy groups of pairs from one pool to another or to itself; all sources are read before the first write.

    source, destination: [num_blocks, ...], of equal blocks, on one device
    table:               int64 [num_groups + 1 + 2 * num_pairs] in the layout of `copy_order.copy_table`, on that device
    """
    pairs = table[num_groups + 1 :].view(-1, 2)
    if source is destination and source.is_cpu:
        copy_blocks(source, pairs)
        return
    _indexable(destination).index_copy_(0, pairs[:, 1], _indexable(source).index_select(0, pairs[:, 0]))


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks from one pool to another, which may be on another device.

    Between a device and pinned memory of the host it only queues the copies.

    source:      [num_source_blocks, ...]
    destination: [num_destination_blocks, ...], the same block shape and dtype
    pairs:       [P, 2] int64, (source block, destination block), on the CPU, no destination twice
    """
    _copy_each(source, destination, pairs)


def _indexable(pool: Tensor) -> Tensor:
    """View a pool of e4m3 as bytes, since torch does not copy e4m3 by index on every device."""
    return pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool


def _copy_each(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy block by block, each contiguous: on a CPU several times as fast as gather and scatter."""
    for source_block, block in pairs.tolist():
        destination[block].copy_(source[source_block], non_blocking=True)


def flat_token_rows(cache: Tensor) -> Tensor:
    """View a strided cache as one row per token: [num_rows, num_kv_heads * head_dim].

    Token `t` of block `b` is row `b * block_row_stride(cache) + t`; the rows between belong to other layers.

    cache: [num_blocks, block_size, num_kv_heads, head_dim], each token's heads contiguous
    """
    num_blocks, block_size = cache.shape[:2]
    row_width = cache.stride(1)
    num_rows = (num_blocks - 1) * block_row_stride(cache) + block_size
    return cache.as_strided((num_rows, row_width), (row_width, 1))


def block_row_stride(cache: Tensor) -> int:
    """Number of token rows from the start of a block to that of the next."""
    num_kv_heads, head_dim = cache.shape[2:]
    row_width = num_kv_heads * head_dim
    assert cache.stride()[1:] == (row_width, head_dim, 1), "a token's heads must be contiguous"
    assert cache.stride(0) % row_width == 0, "a block must begin on a token row"
    return cache.stride(0) // row_width
