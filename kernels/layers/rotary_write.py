"""Rotary embedding of queries and keys, and the write of keys and values into their slots, in one launch.

So a token's new key and value are read once and written once, to their final place. The torch reference is
`kernels.layers.layer_ops.rotate_and_write`. Knows slots and strides; no block table, and no frequencies.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.layers.layer_ops import Rotary

HEADS_PER_PROGRAM = 8
NUM_WARPS = 2  # 16 bytes a thread of half a head
_E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def _rotate(
    p_first: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, o_angle: tl.tensor, m_x: tl.tensor, HALF: tl.constexpr
) -> tl.tuple:
    """Both halves of the rotary dimensions, [heads, half] each, rotated by their angles, in float32.

    The angles are loaded once for each head, from the cache of the GPU, so that they have the layout of the heads.
    """
    b_cos = tl.load(cos_ptr + o_angle, mask=m_x, other=0.0).to(tl.float32)
    b_sin = tl.load(sin_ptr + o_angle, mask=m_x, other=0.0).to(tl.float32)
    b_first = tl.load(p_first, mask=m_x, other=0.0).to(tl.float32)
    b_second = tl.load(p_first + HALF, mask=m_x, other=0.0).to(tl.float32)
    return b_first * b_cos - b_second * b_sin, b_second * b_cos + b_first * b_sin


@triton.jit
def _store(p_cache: tl.tensor, b_x: tl.tensor, m_x: tl.tensor) -> None:
    """Store in the cache's dtype, without overflow to NaN for e4m3."""
    if p_cache.dtype.element_ty == tl.float8e4nv:
        b_x = tl.clamp(b_x.to(tl.float32), -_E4M3_MAX, _E4M3_MAX)
    tl.store(p_cache, b_x.to(p_cache.dtype.element_ty), mask=m_x)


@triton.jit
def rotary_write_kernel(
    query_ptr: tl.tensor,  # [T, NUM_HEADS, HEAD_DIM]
    key_ptr: tl.tensor,  # [T, NUM_KV_HEADS, HEAD_DIM]
    value_ptr: tl.tensor,  # [T, NUM_KV_HEADS, HEAD_DIM]
    cos_ptr: tl.tensor,  # [T, HALF]
    sin_ptr: tl.tensor,  # [T, HALF]
    key_cache_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    value_cache_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    slot_ptr: tl.tensor,  # int64 [T]
    query_stride: tl.tensor,  # from token to token
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2; 0 rotates nothing
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # per program
    HALF_TILE: tl.constexpr,  # HALF and below HEAD_DIM, as powers of two
    DIM_TILE: tl.constexpr,
) -> None:
    """One program: some heads of one token's query, or the same heads of its key and value."""
    i_token = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1)
    NUM_QUERY_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS if HALF > 0 else 0
    o_half = tl.arange(0, HALF_TILE)
    m_half = o_half < HALF
    o_angle = i_token * HALF + tl.broadcast_to(o_half[None, :], (HEADS, HALF_TILE))
    if i_part < NUM_QUERY_PARTS:
        o_head = i_part * HEADS + tl.arange(0, HEADS)
        m_x = (o_head < NUM_HEADS)[:, None] & m_half[None, :]
        p_first = query_ptr + i_token * query_stride + o_head[:, None] * HEAD_DIM + o_half[None, :]
        b_first, b_second = _rotate(p_first, cos_ptr, sin_ptr, o_angle, m_x, HALF)
        tl.store(p_first, b_first.to(query_ptr.dtype.element_ty), mask=m_x)
        tl.store(p_first + HALF, b_second.to(query_ptr.dtype.element_ty), mask=m_x)
    else:
        i_slot = tl.load(slot_ptr + i_token)
        if i_slot >= 0:
            o_head = (i_part - NUM_QUERY_PARTS) * HEADS + tl.arange(0, HEADS)
            m_head = (o_head < NUM_KV_HEADS)[:, None]
            o_row = o_head[:, None] * HEAD_DIM
            i_block, i_offset = i_slot // BLOCK_SIZE, i_slot % BLOCK_SIZE
            p_key = key_ptr + i_token * key_stride + o_row
            p_key_slot = key_cache_ptr + i_block * key_block_stride + i_offset * NUM_KV_HEADS * HEAD_DIM + o_row
            if HALF > 0:
                m_x = m_head & m_half[None, :]
                p_first = p_key + o_half[None, :]
                b_first, b_second = _rotate(p_first, cos_ptr, sin_ptr, o_angle, m_x, HALF)
                _store(p_key_slot + o_half[None, :], b_first, m_x)
                _store(p_key_slot + HALF + o_half[None, :], b_second, m_x)
            o_dim = tl.arange(0, DIM_TILE)[None, :]
            m_dim = m_head & (o_dim < HEAD_DIM)
            if 2 * HALF < HEAD_DIM:
                m_rest = m_dim & (o_dim >= 2 * HALF)
                _store(p_key_slot + o_dim, tl.load(p_key + o_dim, mask=m_rest, other=0.0), m_rest)
            b_value = tl.load(value_ptr + i_token * value_stride + o_row + o_dim, mask=m_dim, other=0.0)
            p_value_slot = value_cache_ptr + i_block * value_block_stride + i_offset * NUM_KV_HEADS * HEAD_DIM + o_row
            _store(p_value_slot + o_dim, b_value, m_dim)


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: Rotary | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Rotate queries in place, and put each token's rotated key and its value into its slot.

    Dimension i rotates with i + rotary_dim / 2. Those from rotary_dim on are unchanged, and without `rotary` all are.
    For a cache of e4m3, numbers are rounded to the nearest, at most 448. `key` itself is unchanged. The arithmetic is
    float32, rounded once.

    query:                  [T, num_heads, head_dim], any token stride
    key, value:             [T, num_kv_heads, head_dim], any token stride
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], any block stride
    slot_mapping:           [T] int64, block_id * block_size + offset, no slot twice; negative where a token is
                            padding and is not written
    """
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    for x in (query, key, value):
        assert x.stride()[1:] == (head_dim, 1), "a token's heads must be contiguous"
    for cache in (key_cache, value_cache):
        assert cache.stride()[1:] == (num_kv_heads * head_dim, head_dim, 1), "a block must be contiguous"
    assert slot_mapping.is_contiguous()
    cos, sin = (query, query) if rotary is None else rotary
    half = 0 if rotary is None else cos.shape[1]
    assert rotary is None or (cos.is_contiguous() and sin.is_contiguous() and 2 * half <= head_dim)
    if num_tokens == 0:
        return
    num_query_parts = triton.cdiv(num_heads, HEADS_PER_PROGRAM) if half else 0
    rotary_write_kernel[(num_tokens, num_query_parts + triton.cdiv(num_kv_heads, HEADS_PER_PROGRAM))](
        query,
        key,
        value,
        cos,
        sin,
        key_cache,
        value_cache,
        slot_mapping,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_SIZE=block_size,
        HEADS=HEADS_PER_PROGRAM,
        HALF_TILE=triton.next_power_of_2(max(1, half)),
        DIM_TILE=triton.next_power_of_2(head_dim),
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
