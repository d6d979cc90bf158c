"""Configurations of all kernels for the compile gate.

Add the configurations of a new kernel here, each with the numbers that its wrapper chooses for real model shapes.
"""

import triton

from benchmarks.gpu.gate.cascade_launches import CASCADES
from benchmarks.gpu.gate.decode_launches import DECODES
from benchmarks.gpu.gate.launch_config import LaunchConfig
from benchmarks.gpu.gate.prefill_launches import PREFILLS
from benchmarks.gpu.gate.product_launches import PRODUCTS
from benchmarks.gpu.gate.sampling_launches import SAMPLINGS
from benchmarks.gpu.gate.step_input_launches import STEP_INPUTS
from benchmarks.gpu.gate.tuned_launches import TUNED
from kernels.blocks import block_copy
from kernels.layers import activations, norms, rotary_write
from kernels.layers.layer_ops import Activation

BLOCK_COPIES = (
    LaunchConfig(
        name="copy blocks",
        kernel=block_copy.copy_kernel,
        arguments={
            "source_ptr": "*i64",
            "destination_ptr": "*i64",
            "table_ptr": "*i64",
            "num_words": "i32",
            "num_groups": "i32",
            "num_chunks": "i32",
        },
        constants={"CHUNK": block_copy.CHUNK_WORDS},
        divisible_by_16=("num_words",),
        num_warps=block_copy.NUM_WARPS,
        num_stages=1,
    ),
)


def _rotary_write(name: str, dtype: str, cache_dtype: str, heads: tuple[int, int, int], half: int) -> LaunchConfig:
    """Launch of the rotary write. heads: query heads, key-value heads, head dimension."""
    num_heads, num_kv_heads, head_dim = heads
    return LaunchConfig(
        name=f"rotary write {name}",
        kernel=rotary_write.rotary_write_kernel,
        arguments={
            "query_ptr": f"*{dtype}",
            "key_ptr": f"*{dtype}",
            "value_ptr": f"*{dtype}",
            **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32" if half else f"*{dtype}"),
            "key_cache_ptr": f"*{cache_dtype}",
            "value_cache_ptr": f"*{cache_dtype}",
            "slot_ptr": "*i64",
            **dict.fromkeys(_ROTARY_WRITE_STRIDES, "i32"),
        },
        constants={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "HALF": half,
            "BLOCK_SIZE": 16,
            "HEADS": rotary_write.HEADS_PER_PROGRAM,
            "HALF_TILE": triton.next_power_of_2(max(1, half)),
            "DIM_TILE": triton.next_power_of_2(head_dim),
        },
        divisible_by_16=_ROTARY_WRITE_STRIDES,
        num_warps=rotary_write.NUM_WARPS,
        capabilities=(90,) if cache_dtype == "fp8e4nv" else (80, 90),
    )


_ROTARY_WRITE_STRIDES = ("query_stride", "key_stride", "value_stride", "key_block_stride", "value_block_stride")
ROTARY_WRITES = (
    _rotary_write("bf16 32/8/128", "bf16", "bf16", (32, 8, 128), 64),
    _rotary_write("fp16 32/32/128", "fp16", "fp16", (32, 32, 128), 64),
    _rotary_write("bf16 32/8/128 cache e4m3", "bf16", "fp8e4nv", (32, 8, 128), 64),
    _rotary_write("bf16 32/32/80, 32 of 80", "bf16", "bf16", (32, 32, 80), 16),
    _rotary_write("fp32 12/12/64 without rotation", "fp32", "fp32", (12, 12, 64), 0),
    _rotary_write("fp16 32/32/128 without rotation", "fp16", "fp16", (32, 32, 128), 0),
)


def _norm(name: str, dtype: str, size: int, *, rms: bool, has_residual: bool, has_bias: bool = False) -> LaunchConfig:
    return LaunchConfig(
        name=f"{name} {dtype} {size}",
        kernel=norms.norm_kernel,
        arguments={
            "x_ptr": f"*{dtype}",
            "residual_ptr": f"*{dtype}",
            "weight_ptr": f"*{dtype}",
            "bias_ptr": f"*{dtype}",
            "out_ptr": f"*{dtype}",
            "outer_stride": "i32",
            "inner_stride": "i32",
            "num_inner": "i32",
            "eps": "fp32",
        },
        constants={
            "SIZE": size,
            "TILE": triton.next_power_of_2(size),
            "RMS": rms,
            "HAS_RESIDUAL": has_residual,
            "HAS_WEIGHT": True,
            "HAS_BIAS": has_bias,
        },
        divisible_by_16=("outer_stride", "inner_stride"),
        num_warps=norms.num_warps(size),
        wide_loads=size >= 256,  # a head of 128 has 4 elements for each thread of a warp
    )


NORMS = (
    _norm("rms norm + residual", "bf16", 4096, rms=True, has_residual=True),
    _norm("rms norm + residual", "fp16", 5120, rms=True, has_residual=True),
    _norm("rms norm + residual", "bf16", 16384, rms=True, has_residual=True),
    _norm("rms norm of heads", "bf16", 128, rms=True, has_residual=False),
    _norm("layer norm + residual", "fp16", 768, rms=False, has_residual=True, has_bias=True),
    _norm("layer norm + residual", "fp16", 12288, rms=False, has_residual=True, has_bias=True),
)


def _gated_activation(activation: Activation, dtype: str, size: int) -> LaunchConfig:
    return LaunchConfig(
        name=f"gated {activation} {dtype} {size}",
        kernel=activations.gated_activation_kernel,
        arguments={"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "x_stride": "i32"},
        constants={"SIZE": size, "ACTIVATION": activation, "TILE": activations.TILE},
        divisible_by_16=("x_stride",),
        num_warps=activations.NUM_WARPS,
    )


GATED_ACTIVATIONS = (
    _gated_activation("silu", "bf16", 14336),
    _gated_activation("gelu_tanh", "bf16", 16384),
    _gated_activation("gelu", "fp16", 11008),
    _gated_activation("relu", "fp32", 8192),
)

LAUNCHES: tuple[LaunchConfig, ...] = (
    *BLOCK_COPIES,
    *ROTARY_WRITES,
    *NORMS,
    *GATED_ACTIVATIONS,
    *DECODES,
    *PREFILLS,
    *STEP_INPUTS,
    *SAMPLINGS,
    *CASCADES,
    *PRODUCTS,
    *TUNED,
)
