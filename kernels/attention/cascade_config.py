"""Launch configuration of shared-prefix attention for each shape: the tile of queries that attend a prefix together,
and keys, warps and stages of both its kernels.

Taken from the table of tuned shapes, else from a rule based on the compiler's report of registers and shared memory.
Imports no Triton.
"""

from dataclasses import dataclass

import torch

from kernels.attention.decode_config import DecodeConfig, decode_config
from kernels.attention.device_family import HOPPER, DeviceFamily
from kernels.attention.shape import AttentionShape
from kernels.attention.tuned_lookup import tuned_row

_MATRIX_UNIT_ROWS = 64  # least rows for Hopper's matrix units
_WIDE_HEAD = 256  # padded dimension from which a tile's sums spill with four warps
_NUM_STAGES = 3  # the next tile is loaded while one is computed
_SHARED_BYTES = 58_000  # of a program with four warps without asynchronous products; registers allow two at once
_WIDE_BYTES = 110_000  # and of one with wide heads
_TILE = 64  # keys; half of it if the head dimension is no power of two, since its masks need registers too


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeConfig:
    """One launch configuration of the two kernels."""

    rows: int  # queries of a tile, each of one member and one head
    prefix: DecodeConfig
    suffix: DecodeConfig


def cascade_config(shape: AttentionShape, family: DeviceFamily = HOPPER) -> CascadeConfig:
    """The configuration for a shape on a family of devices."""
    row = tuned_row("prefix", shape, family)
    if row is None:
        return cascade_rule(shape, family)
    prefix = DecodeConfig(
        tile=row.tile, num_warps=row.num_warps, num_stages=row.num_stages, programs_per_sm=row.programs_per_sm
    )
    return CascadeConfig(rows=row.rows, prefix=prefix, suffix=decode_config(shape, family))


def cascade_rule(shape: AttentionShape, family: DeviceFamily = HOPPER) -> CascadeConfig:
    """The configuration of a shape that was not tuned."""
    suffix = decode_config(shape, family)
    if shape.dtype == torch.float32:  # without tensor cores, so that products are exact
        prefix = DecodeConfig(tile=16, num_warps=8, num_stages=2, programs_per_sm=1)
        return CascadeConfig(rows=32, prefix=prefix, suffix=suffix)
    if shape.padded_dim >= _WIDE_HEAD:
        num_stages = _NUM_STAGES if family.program_bytes >= _WIDE_BYTES else 2
        prefix = DecodeConfig(tile=32, num_warps=8, num_stages=num_stages, programs_per_sm=1)
    else:
        # On an H200 one program at once was as fast as two, and leaves half of the partial results to merge.
        programs = 1 if family.has_asynchronous_products else min(2, family.programs_with(_SHARED_BYTES))
        tile = _TILE if shape.head_dim == shape.padded_dim else _TILE // 2
        prefix = DecodeConfig(tile=tile, num_warps=4, num_stages=_NUM_STAGES, programs_per_sm=programs)
    rows = _MATRIX_UNIT_ROWS // 2 if shape.has_short_halves else _MATRIX_UNIT_ROWS
    return CascadeConfig(rows=rows, prefix=prefix, suffix=suffix)
