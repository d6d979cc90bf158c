"""Configurations of decode attention and its planning for the compile gate, one per kind of shape."""

from collections.abc import Mapping

import torch

from benchmarks.gpu.gate.attention_shapes import argument_types, attention_shape, capabilities, in_words
from benchmarks.gpu.gate.launch_config import LaunchConfig
from kernels.attention import decode_attention, decode_plan
from kernels.attention.decode_config import decode_config
from kernels.attention.decode_reference import DecodeRows, empty_plan
from kernels.attention.shape import AttentionShape

_INT_POINTERS = ("table_ptr", "work_ptr", "num_work_ptr", "num_arrived_ptr", "num_partials_ptr", "first_partials_ptr")
_MATRIX_UNIT_ROWS = 64  # least rows for Hopper's matrix units


def decode_launch(
    heads: tuple[int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    *,
    soft_cap: bool = False,
    max_loop_size: Mapping[int, int] | None = None,
) -> LaunchConfig:
    """Launch for blocks of 16 tokens. heads: query heads, key-value heads, head dimension.

    max_loop_size: most instructions of a warp and a tile of keys, by compute capability, which are then compiled for
    """
    shape = attention_shape(heads, dtype, kv_dtype)
    config = decode_config(shape)
    row = DecodeRows(torch.zeros(1, dtype=torch.int32), torch.zeros((1, 1), dtype=torch.int32))
    constants = decode_attention.launch_constants(empty_plan(row, shape, config, 16, 1), soft_cap, with_lse=True)
    return LaunchConfig(
        name=f"decode {in_words(shape)}",
        kernel=decode_attention.decode_kernel,
        arguments=_argument_types(shape),
        constants=constants,
        divisible_by_16=tuple(name for name in _argument_types(shape) if name.startswith("stride_")),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        capabilities=tuple({*capabilities(shape), *(max_loop_size or {})}),
        max_loop_size=max_loop_size or {},
        wgmma=shape.dot_rows >= _MATRIX_UNIT_ROWS and dtype != torch.float32,
    )


def _argument_types(shape: AttentionShape) -> Mapping[str, str]:
    """Types of arguments, as the wrapper passes them. The stride of block tables has no known alignment, but is only
    read as a scalar.
    """
    types = {name: "i32" for name in decode_attention.decode_kernel.arg_names if name.startswith("stride_")}
    types |= dict.fromkeys(_INT_POINTERS, "*i32")
    types |= dict.fromkeys(("lse_ptr", "partial_out_ptr", "partial_lse_ptr"), "*fp32")
    return types | argument_types(shape)


def _plan_launch(padded_rows: int) -> LaunchConfig:
    return LaunchConfig(
        name=f"plan decode of {padded_rows} rows",
        kernel=decode_plan.plan_kernel,
        arguments={
            "context_lens_ptr": "*i32",
            "work_ptr": "*i32",
            "num_work_ptr": "*i32",
            "prefix_lens_ptr": "*i32",
            "num_partials_ptr": "*i32",
            "first_partials_ptr": "*i32",
            "num_rows": "i32",
            "window": "i32",
        },
        constants=decode_plan.plan_constants(
            tile=64, padded_rows=padded_rows, num_kv_heads=8, num_programs=396, with_prefix=False
        ),
        num_warps=decode_plan.plan_warps(padded_rows),
        wide_loads=False,
    )


DECODES = (
    decode_launch((32, 8, 128), max_loop_size={80: 330, 90: 330}),
    decode_launch((32, 8, 128), kv_dtype=torch.float8_e4m3fn, max_loop_size={89: 920, 90: 940}),
    decode_launch((32, 32, 128), torch.float16),
    decode_launch((32, 1, 128)),
    decode_launch((64, 1, 128)),
    decode_launch((128, 1, 128)),
    decode_launch((12, 12, 64)),
    decode_launch((40, 8, 80)),
    decode_launch((16, 8, 256), soft_cap=True),
    decode_launch((32, 8, 128), torch.float32),
    _plan_launch(256),
    _plan_launch(4096),
)
