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

# Elements of keys in a loop iteration, and as many of values: of 16 bits small tiles in three buffers keep most bytes
# on their way; of e4m3 a large tile in one costs the fewest conversions and barriers (measured on an H200).
_TILE_ELEMENTS, _E4M3_TILE_ELEMENTS = 4096, 16384
_MIN_TILE, _MAX_TILE = 32, 128
_NUM_STAGES, _E4M3_STAGES = 4, 2  # one more than there are buffers
_FEWER_STAGES = 3  # where tiles are larger, or shared memory is small
_OTHER_BYTES = 8 * 1024  # shared memory for queries and conversions, at most
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
    if _num_fitting(shape, config, family) == 1:
        config = replace(config, num_stages=min(config.num_stages, _FEWER_STAGES))
    if shape.head_dim != shape.padded_dim and _num_fitting(shape, config, family) == 1:
        config = replace(config, tile=max(MIN_DOT_ROWS, config.tile // 2))  # with one program, masks would spill
    return replace(config, programs_per_sm=min(config.programs_per_sm, _num_fitting(shape, config, family)))


def _num_fitting(shape: AttentionShape, config: DecodeConfig, family: DeviceFamily) -> int:
    """Programs that fit into a multiprocessor's shared memory, at least 1."""
    buffer_bytes = 2 * config.tile * shape.padded_dim * shape.kv_dtype.itemsize  # of keys and values
    return family.programs_with((config.num_stages - 1) * buffer_bytes + _OTHER_BYTES)


def _hopper_rule(shape: AttentionShape) -> DecodeConfig:
    if shape.dtype == torch.float32:  # without tensor cores, so that products are exact
        narrow = shape.dot_rows == MIN_DOT_ROWS
        return DecodeConfig(tile=16, num_warps=4 if narrow else 8, num_stages=3, programs_per_sm=3 if narrow else 1)
    if shape.dot_rows * shape.padded_dim >= _WIDE_ACCUMULATOR:
        tile = max(_MIN_TILE, 2 * _TILE_ELEMENTS // shape.padded_dim)
        return DecodeConfig(tile=tile, num_warps=8, num_stages=_FEWER_STAGES, programs_per_sm=1)
    if shape.kv_dtype == shape.dtype:
        tile = min(_MAX_TILE, max(_MIN_TILE, _TILE_ELEMENTS // shape.padded_dim))
        num_stages = _NUM_STAGES if shape.padded_dim <= _NARROW_HEAD else _FEWER_STAGES
    elif shape.padded_dim <= _NARROW_HEAD:
        tile, num_stages = min(_MAX_TILE, _E4M3_TILE_ELEMENTS // shape.padded_dim), _E4M3_STAGES
    else:
        tile, num_stages = _MIN_TILE, _FEWER_STAGES
    return DecodeConfig(tile=tile, num_warps=4, num_stages=num_stages, programs_per_sm=_programs_per_sm(shape))


def _programs_per_sm(shape: AttentionShape) -> int:
    """Programs that Hopper holds at once: four of 55 KB and at most 128 registers a thread, or fewer of wider heads."""
    if shape.dot_rows != MIN_DOT_ROWS:
        return 2
    if shape.padded_dim <= _NARROW_HEAD:
        return 4
    return 3 if shape.kv_dtype == shape.dtype else 2


def num_processors(device: torch.device) -> int:
    """Number of a CUDA device's multiprocessors; a small number on a CPU."""
    if device.type != "cuda":
        return _CPU_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
