"""Configurations of products with weights of 8 and 4 bits for the compile gate, by the matrices of an 8 B model."""

import torch
import triton

from benchmarks.gpu.gate.launch_config import LaunchConfig
from kernels.products import int4_product, row_quantising
from kernels.products.int4_matrix import GROUP
from kernels.products.int4_tiling import FEW_ROWS, MORE_ROWS, OUTPUTS, int4_tiling

_MOST_INSTRUCTIONS = 620  # of a warp, for a group of 128 inputs and 128 outputs: 8 KiB of codes
_SIZE = 4096
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_INT4_TYPES = {
    "codes_ptr": "*i32",
    "zeros_ptr": "*u8",
    "num_arrived_ptr": "*i32",
    **dict.fromkeys(("num_rows", "num_outputs", "num_groups", "split_groups", "num_splits", "x_stride"), "i32"),
}


def _quantise_rows(dtype: str, size: int) -> LaunchConfig:
    return LaunchConfig(
        name=f"quantise rows {dtype} {size}",
        kernel=row_quantising.quantise_rows_kernel,
        arguments={"x_ptr": f"*{dtype}", "codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "x_stride": "i32"},
        constants={"SIZE": size, "TILE": triton.next_power_of_2(size)},
        divisible_by_16=("x_stride",),
        num_warps=row_quantising.num_warps(size),
        capabilities=(89, 90),
    )


def int4_launch(dtype: str, num_rows: int, *, has_bias: bool, is_split: bool) -> LaunchConfig:
    """Launch for so many rows. is_split: over the inputs."""
    rows = int4_tiling(num_rows, _SIZE, _SIZE // GROUP, _DTYPES[dtype], torch.device("cpu")).rows
    types = dict.fromkeys(("x_ptr", "scales_ptr", "bias_ptr", "out_ptr"), f"*{dtype}") | _INT4_TYPES
    types["partial_ptr"] = "*fp32" if is_split else f"*{dtype}"  # unused, and another in its place
    constants = {"ROWS": rows, "OUTPUTS": OUTPUTS, "HAS_BIAS": has_bias}
    if not is_split:
        types.pop("num_splits")
        constants["num_splits"] = 1
    return LaunchConfig(
        name=f"int4 product {dtype} {rows} rows{' bias' if has_bias else ''}{' split' if is_split else ''}",
        kernel=int4_product.int4_kernel,
        arguments=types,
        constants=constants,
        divisible_by_16=("num_outputs", "num_groups", "x_stride"),
        num_warps=int4_product.NUM_WARPS,
        num_stages=int4_product.NUM_STAGES,
        capabilities=(80, 89, 90),
        max_loop_size=dict.fromkeys((80, 90), _MOST_INSTRUCTIONS) if rows == FEW_ROWS and dtype != "fp32" else {},
    )


def _expand_int4(dtype: str) -> LaunchConfig:
    types = {"scales_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "num_outputs": "i32", "num_groups": "i32"}
    return LaunchConfig(
        name=f"write out int4 {dtype}",
        kernel=int4_product.expand_int4_kernel,
        arguments={"codes_ptr": "*i32", "zeros_ptr": "*u8", **types},
        constants={"OUTPUTS": int4_product.EXPANDED_OUTPUTS},
        divisible_by_16=("num_outputs", "num_groups"),
        num_warps=int4_product.NUM_WARPS,
        wide_loads=False,  # 16 words of an output for half a warp
    )


PRODUCTS = (
    _quantise_rows("bf16", 4096),
    _quantise_rows("fp16", 14336),
    int4_launch("bf16", FEW_ROWS, has_bias=False, is_split=False),
    int4_launch("bf16", FEW_ROWS, has_bias=False, is_split=True),
    int4_launch("bf16", MORE_ROWS, has_bias=False, is_split=True),
    int4_launch("fp16", FEW_ROWS, has_bias=True, is_split=True),
    int4_launch("fp16", MORE_ROWS, has_bias=False, is_split=False),
    int4_launch("fp32", FEW_ROWS, has_bias=False, is_split=False),
    int4_launch("fp32", MORE_ROWS, has_bias=True, is_split=True),
    _expand_int4("bf16"),
    _expand_int4("fp16"),
)
