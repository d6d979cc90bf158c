"""Writes keys and values into blocks for tests of what reads them, by plain indexing."""

from torch import Tensor


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put each token's key and value into its slot.

    key, value:             [T, num_kv_heads, head_dim]
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], any block stride
    slot_mapping:           [T] int64, block_id * block_size + offset, no slot twice
    """
    block_size = key_cache.shape[1]
    places = (slot_mapping // block_size, slot_mapping % block_size)
    key_cache.index_put_(places, key)
    value_cache.index_put_(places, value)
