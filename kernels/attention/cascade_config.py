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
_NUM_STAGES = 4  # the next tile is loaded while one is computed; with one stage more, Ampere's code spills
# Shared memory of a program with four warps, of which registers allow two at once; only asynchronous products read
# queries from there.
_SHARED_BYTES, _SHARED_WITH_QUERIES = 58_000, 83_000
_STAGES_OF_ONE = 5  # where one program fits: with one stage less, some compilers' code spills
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
        prefix = DecodeConfig(tile=32, num_warps=8, num_stages=_NUM_STAGES, programs_per_sm=1)
    else:
        shared_bytes = _SHARED_WITH_QUERIES if family.has_asynchronous_products else _SHARED_BYTES
        fitting = family.programs_with(shared_bytes)
        tile = _TILE if shape.head_dim == shape.padded_dim else _TILE // 2
        num_stages = _NUM_STAGES if fitting > 1 else _STAGES_OF_ONE
        prefix = DecodeConfig(tile=tile, num_warps=4, num_stages=num_stages, programs_per_sm=min(2, fitting))
    return CascadeConfig(rows=_MATRIX_UNIT_ROWS, prefix=prefix, suffix=suffix)
