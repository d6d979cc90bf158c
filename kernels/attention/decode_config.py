"""How decode attention is launched for each shape: tile, warps, pipeline stages, and how many programs share a
multiprocessor.

Chosen from what the compiler reports of registers and shared memory; not tuned on a GPU yet. It imports no Triton.
"""

from dataclasses import dataclass

import torch

from kernels.attention.shape import MIN_DOT_ROWS, AttentionShape

_TILE_ELEMENTS = 8192  # of keys in a loop iteration, and the same again of values
_MIN_TILE, _MAX_TILE = 32, 128
# One stage holds block ids; the stages beyond three give keys and values a second buffer, so that the next tile is on
# its way while one is worked on.
_NUM_STAGES = 5
_WIDE_ACCUMULATOR = 128 * 128  # float32 sums of a program, from which on four warps would spill them


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """One way to launch the kernel."""

    tile: int  # keys per loop iteration
    num_warps: int
    num_stages: int
    programs_per_sm: int  # that registers and shared memory of a multiprocessor hold at once


def decode_config(shape: AttentionShape) -> DecodeConfig:
    """The configuration for a shape; the counts of programs are for Hopper."""
    if shape.dtype == torch.float32:  # without tensor cores, so that products are exact
        narrow = shape.dot_rows == MIN_DOT_ROWS
        return DecodeConfig(tile=16, num_warps=4 if narrow else 8, num_stages=4, programs_per_sm=3 if narrow else 1)
    tile = max(_MIN_TILE, min(_MAX_TILE, _TILE_ELEMENTS // shape.padded_dim))
    if shape.dot_rows * shape.padded_dim >= _WIDE_ACCUMULATOR:
        return DecodeConfig(tile=tile, num_warps=8, num_stages=_NUM_STAGES, programs_per_sm=1)
    small = shape.dot_rows == MIN_DOT_ROWS and shape.kv_dtype == shape.dtype
    return DecodeConfig(tile=tile, num_warps=4, num_stages=_NUM_STAGES, programs_per_sm=3 if small else 2)
