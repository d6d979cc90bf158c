"""Launch configuration of decode attention for each shape: tile, warps, pipeline stages, and programs per
multiprocessor.

Taken from the table of tuned shapes, else from a rule based on the compiler's report of registers and shared memory.
Imports no Triton.
"""

from dataclasses import dataclass, replace

import torch

from kernels.attention.device_family import HOPPER, DeviceFamily
from kernels.attention.shape import MIN_DOT_ROWS, AttentionShape
from kernels.attention.tuned_lookup import tuned_row

_TILE_ELEMENTS = 8192  # of keys in a loop iteration, and as many of values
_MIN_TILE, _MAX_TILE = 32, 128
# One stage holds block ids; the stages beyond three give keys and values a second buffer, so that the next tile is
# loaded while one is computed.
_NUM_STAGES = 5
_BUFFERS = 4  # two of keys and two of values
_OTHER_BYTES = 8 * 1024  # shared memory for queries and block ids, at most
_CPU_PROCESSORS = 4  # few, but enough for tests to split work
_NARROW_HEAD = 128  # padded dimension up to which keys of e4m3 take few registers
_WIDE_ACCUMULATOR = 128 * 128  # float32 sums of a program, from which four warps spill them


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """One launch configuration of the kernel."""

    tile: int  # keys per loop iteration
    num_warps: int
    num_stages: int
    programs_per_sm: int  # that fit into a multiprocessor at once, by registers and shared memory


def decode_config(shape: AttentionShape, family: DeviceFamily = HOPPER) -> DecodeConfig:
    """The configuration for a shape on a family of devices."""
    row = tuned_row("decode", shape, family)
    if row is None:
        return decode_rule(shape, family)
    return DecodeConfig(
        tile=row.tile, num_warps=row.num_warps, num_stages=row.num_stages, programs_per_sm=row.programs_per_sm
    )


def decode_rule(shape: AttentionShape, family: DeviceFamily = HOPPER) -> DecodeConfig:
    """The configuration of a shape that was not tuned; the number of programs is Hopper's, or fewer."""
    config = _hopper_rule(shape)
    if shape.head_dim != shape.padded_dim and _num_fitting(shape, config.tile, family) == 1:
        config = replace(config, tile=max(MIN_DOT_ROWS, config.tile // 2))  # with one program, masks would spill
    return replace(config, programs_per_sm=min(config.programs_per_sm, _num_fitting(shape, config.tile, family)))


def _num_fitting(shape: AttentionShape, tile: int, family: DeviceFamily) -> int:
    """Programs that fit into a multiprocessor's shared memory, at least 1."""
    return family.programs_with(_BUFFERS * tile * shape.padded_dim * shape.kv_dtype.itemsize + _OTHER_BYTES)


def _hopper_rule(shape: AttentionShape) -> DecodeConfig:
    if shape.dtype == torch.float32:  # without tensor cores, so that products are exact
        narrow = shape.dot_rows == MIN_DOT_ROWS
        return DecodeConfig(tile=16, num_warps=4 if narrow else 8, num_stages=4, programs_per_sm=3 if narrow else 1)
    tile = max(_MIN_TILE, min(_MAX_TILE, _TILE_ELEMENTS // shape.padded_dim))
    if shape.dot_rows * shape.padded_dim >= _WIDE_ACCUMULATOR:
        return DecodeConfig(tile=tile, num_warps=8, num_stages=_NUM_STAGES, programs_per_sm=1)
    return DecodeConfig(tile=tile, num_warps=4, num_stages=_NUM_STAGES, programs_per_sm=_programs_per_sm(shape))


def _programs_per_sm(shape: AttentionShape) -> int:
    """Programs that Hopper holds at once: three of 72 KB, or four of 40 KB and at most 128 registers a thread."""
    if shape.dot_rows != MIN_DOT_ROWS:
        return 2
    if shape.kv_dtype == shape.dtype:
        return 3
    return 4 if shape.padded_dim <= _NARROW_HEAD else 2


def num_processors(device: torch.device) -> int:
    """Number of a CUDA device's multiprocessors; a small number on a CPU."""
    if device.type != "cuda":
        return _CPU_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
