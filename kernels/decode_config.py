"""How decode attention is launched for each shape: tile, warps, pipeline stages, and how many programs share a
multiprocessor.

Chosen from what the compiler reports of registers and shared memory; not tuned on a GPU yet. It imports no Triton.
"""

from dataclasses import dataclass

import torch

MIN_DOT_ROWS = 16  # the least height of a tensor-core tile

_TILE_ELEMENTS = 8192  # of keys in a loop iteration, and the same again of values
_MIN_TILE, _MAX_TILE = 32, 128
# One stage holds block ids; the stages beyond three give keys and values a second buffer, so that the next tile is on
# its way while one is worked on.
_NUM_STAGES = 5
_WIDE_ACCUMULATOR = 128 * 128  # float32 sums of a program, from which on four warps would spill them


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """What a model fixes of decode attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of queries and results
    kv_dtype: torch.dtype  # the same, or float8_e4m3fn

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, "each key-value head serves as many heads as any other"
        assert self.kv_dtype in (self.dtype, torch.float8_e4m3fn), f"no keys of {self.kv_dtype} for {self.dtype}"

    @property
    def group(self) -> int:
        """Heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def dot_rows(self) -> int:
        """The group padded to a tile."""
        return max(MIN_DOT_ROWS, _power_of_2(self.group))

    @property
    def padded_dim(self) -> int:
        return max(MIN_DOT_ROWS, _power_of_2(self.head_dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """One way to launch the kernel."""

    tile: int  # keys per loop iteration
    num_warps: int
    num_stages: int
    programs_per_sm: int  # that registers and shared memory of a multiprocessor hold at once


def decode_config(shape: DecodeShape) -> DecodeConfig:
    """The configuration for a shape; the counts of programs are for Hopper."""
    if shape.dtype == torch.float32:  # without tensor cores, so that products are exact
        narrow = shape.dot_rows == MIN_DOT_ROWS
        return DecodeConfig(tile=16, num_warps=4 if narrow else 8, num_stages=4, programs_per_sm=3 if narrow else 1)
    tile = max(_MIN_TILE, min(_MAX_TILE, _TILE_ELEMENTS // shape.padded_dim))
    if shape.dot_rows * shape.padded_dim >= _WIDE_ACCUMULATOR:
        return DecodeConfig(tile=tile, num_warps=8, num_stages=_NUM_STAGES, programs_per_sm=1)
    small = shape.dot_rows == MIN_DOT_ROWS and shape.kv_dtype == shape.dtype
    return DecodeConfig(tile=tile, num_warps=4, num_stages=_NUM_STAGES, programs_per_sm=3 if small else 2)


def _power_of_2(number: int) -> int:
    """The least power of two that is not below it."""
    return 1 << (number - 1).bit_length()
