"""How decode attention is launched for each shape: tile, warps, pipeline stages, and how many programs share a
multiprocessor.

By the table of tuned shapes, or by a rule from what the compiler reports of registers and shared memory. It imports no
Triton.
"""

from dataclasses import dataclass

import torch

from kernels.attention.shape import MIN_DOT_ROWS, AttentionShape
from kernels.attention.tuned_lookup import tuned_row

_TILE_ELEMENTS = 8192  # of keys in a loop iteration, and the same again of values
_MIN_TILE, _MAX_TILE = 32, 128
# One stage holds block ids; the stages beyond three give keys and values a second buffer, so that the next tile is on
# its way while one is worked on.
_NUM_STAGES = 5
_CPU_PROCESSORS = 4  # so that tests split work, and little
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
    row = tuned_row("decode", shape)
    if row is None:
        return decode_rule(shape)
    return DecodeConfig(
        tile=row.tile, num_warps=row.num_warps, num_stages=row.num_stages, programs_per_sm=row.programs_per_sm
    )


def decode_rule(shape: AttentionShape) -> DecodeConfig:
    """The configuration of a shape that was not tuned."""
    if shape.dtype == torch.float32:  # without tensor cores, so that products are exact
        narrow = shape.dot_rows == MIN_DOT_ROWS
        return DecodeConfig(tile=16, num_warps=4 if narrow else 8, num_stages=4, programs_per_sm=3 if narrow else 1)
    tile = max(_MIN_TILE, min(_MAX_TILE, _TILE_ELEMENTS // shape.padded_dim))
    if shape.dot_rows * shape.padded_dim >= _WIDE_ACCUMULATOR:
        return DecodeConfig(tile=tile, num_warps=8, num_stages=_NUM_STAGES, programs_per_sm=1)
    small = shape.dot_rows == MIN_DOT_ROWS and shape.kv_dtype == shape.dtype
    return DecodeConfig(tile=tile, num_warps=4, num_stages=_NUM_STAGES, programs_per_sm=3 if small else 2)


def num_programs(device: torch.device, config: DecodeConfig) -> int:
    """How many programs run at once on a device."""
    return num_processors(device) * config.programs_per_sm


def num_processors(device: torch.device) -> int:
    """A CUDA device's multiprocessors; a small number elsewhere, where nothing runs at once."""
    if device.type != "cuda":
        return _CPU_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
