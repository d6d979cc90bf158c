"""Tuned configurations of attention for the compile gate, and any other tiling that is to be tried."""

from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.gpu.gate.cascade_launches import prefix_launch
from benchmarks.gpu.gate.decode_launches import decode_launch
from benchmarks.gpu.gate.launch_config import LaunchConfig
from benchmarks.gpu.gate.prefill_launches import prefill_launch
from kernels.attention import prefill_attention
from kernels.attention.device_family import FAMILIES, DeviceFamily
from kernels.attention.prefill_config import PrefillConfig
from kernels.attention.prefill_plan import WORK_FIELDS
from kernels.attention.prefill_reference import PrefillPlan, PrefillRows, empty_partials
from kernels.attention.shape import AttentionShape
from kernels.attention.tuned import ROWS
from kernels.attention.tuned_lookup import AttentionKernel, TunedRow

_BLOCK_SIZE = 16


class Tiling(NamedTuple):
    """Parameters of a launch that can be chosen."""

    rows: int  # of a tile: queries; fixed for decode, as the group's heads, padded
    tile: int
    num_warps: int
    num_stages: int


def launch_with(kernel: AttentionKernel, shape: AttentionShape, tiling: Tiling, family: DeviceFamily) -> LaunchConfig:
    """The launch of a kernel for a shape, with this tiling, on a family of devices."""
    base = _base_launch(kernel, shape)
    constants = {**base.constants, "TILE": tiling.tile}
    if kernel == "prefix":
        constants["ROWS"] = tiling.rows
    elif kernel == "prefill":
        constants = dict(
            prefill_attention.launch_constants(_prefill_plan(shape, tiling), soft_cap=False, with_lse=False)
        )
    numbers = "/".join(map(str, tiling))
    name = f"{kernel} {numbers} for {shape.group} x {shape.head_dim}, keys of {shape.kv_dtype.itemsize} bytes"
    return replace(
        base,
        name=name,
        constants=constants,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        capabilities=(family.number,),
    )


def shape_of(row: TunedRow) -> AttentionShape:
    """A shape with the head counts and dtypes of the entry."""
    dtype = torch.bfloat16
    kv_dtype = dtype if row.kv_bits == row.bits else torch.float8_e4m3fn
    return AttentionShape(
        num_heads=row.group * 8, num_kv_heads=8, head_dim=row.head_dim, dtype=dtype, kv_dtype=kv_dtype
    )


def _base_launch(kernel: AttentionKernel, shape: AttentionShape) -> LaunchConfig:
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    match kernel:
        case "decode":
            return decode_launch(heads, shape.dtype, shape.kv_dtype)
        case "prefill":
            return prefill_launch(heads, shape.dtype, shape.kv_dtype)
        case "prefix":
            return prefix_launch(shape)


def _prefill_plan(shape: AttentionShape, tiling: Tiling) -> PrefillPlan:
    config = PrefillConfig(**tiling._asdict())
    return PrefillPlan(
        rows=PrefillRows(torch.zeros(2), torch.zeros(1), torch.zeros(1, 1)),
        shape=shape,
        config=config,
        block_size=_BLOCK_SIZE,
        sliding_window=None,
        work=torch.zeros(1, WORK_FIELDS),
        partials=empty_partials(shape, config, 1, torch.device("meta")),
    )


def _launch_of(row: TunedRow) -> LaunchConfig:
    kernel: AttentionKernel = "decode" if row.kernel == "decode" else "prefill" if row.kernel == "prefill" else "prefix"
    tiling = Tiling(row.rows, row.tile, row.num_warps, row.num_stages)
    return launch_with(kernel, shape_of(row), tiling, _FAMILIES[row.family])


_FAMILIES = {each.name: each for each in FAMILIES}
# Rows of other capabilities were measured on such a device, whose machine code may be of another kind than these.
TUNED = tuple(_launch_of(row) for row in (TunedRow(*each) for each in ROWS) if row.family in _FAMILIES)
