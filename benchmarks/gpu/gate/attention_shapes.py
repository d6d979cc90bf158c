"""Shapes of attention as the gate's launches describe them: heads and dtypes in words, and what all kernels share."""

import torch

from kernels.attention.shape import AttentionShape

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
}


def attention_shape(
    heads: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None
) -> AttentionShape:
    """Shape of attention. heads: query heads, key-value heads, head dimension."""
    num_heads, num_kv_heads, head_dim = heads
    return AttentionShape(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype or dtype
    )


def in_words(shape: AttentionShape) -> str:
    """Dtype, heads and cache, for the name of a launch."""
    heads = f"{shape.num_heads}/{shape.num_kv_heads}/{shape.head_dim}"
    return f"{_TYPES[shape.dtype]} {heads} cache {_TYPES[shape.kv_dtype]}"


def capabilities(shape: AttentionShape) -> tuple[int, ...]:
    """Compute capabilities to compile for."""
    return (90,) if shape.kv_dtype == torch.float8_e4m3fn else (80, 90)


def argument_types(shape: AttentionShape) -> dict[str, str]:
    """Triton types of the arguments that every attention kernel has, by name."""
    types = dict.fromkeys(("query_ptr", "out_ptr"), f"*{_TYPES[shape.dtype]}")
    types |= dict.fromkeys(("key_ptr", "value_ptr"), f"*{_TYPES[shape.kv_dtype]}")
    return types | dict.fromkeys(("scale", "soft_cap"), "fp32")
