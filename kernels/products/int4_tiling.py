"""Division of the product with a weight of 4 bits among programs. Pure arithmetic; imports no Triton."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.decode_config import num_processors

OUTPUTS = 128  # of a program
FEW_ROWS, MORE_ROWS = 16, 64  # of a program; in float32 more than a few would not fit in its shared memory
MOST_ROWS = 256  # beyond them the weight is written out: each tile of rows converts its codes again
_PROGRAMS_PER_PROCESSOR = 3
_LEAST_GROUPS = 4  # of a split


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Tiling:
    """Tiles and splits of one product."""

    rows: int  # of a tile
    num_row_tiles: int
    num_output_tiles: int
    num_splits: int  # of the inputs
    split_groups: int  # of each split but the last, which may have fewer

    @property
    def num_tiles(self) -> int:
        """Tiles of the result."""
        return self.num_row_tiles * self.num_output_tiles


def int4_tiling(
    num_rows: int, num_outputs: int, num_groups: int, dtype: torch.dtype, device: torch.device
) -> Int4Tiling:
    """Tiling for at most `MOST_ROWS` rows: as many splits as fill the device, each of several groups.

    Splits depend on the weight alone, so that a row's sums have the same order in every batch.
    """
    rows = FEW_ROWS if num_rows <= FEW_ROWS or dtype == torch.float32 else MORE_ROWS
    num_output_tiles = _ceil(num_outputs, OUTPUTS)
    wanted = _ceil(_PROGRAMS_PER_PROCESSOR * num_processors(device), num_output_tiles)
    split_groups = max(min(_LEAST_GROUPS, num_groups), num_groups // wanted)
    return Int4Tiling(
        rows=rows,
        num_row_tiles=_ceil(num_rows, rows),
        num_output_tiles=num_output_tiles,
        num_splits=_ceil(num_groups, split_groups),
        split_groups=split_groups,
    )


def arrival_counters(num_outputs: int, device: torch.device) -> Tensor:
    """Counters of the programs that have finished, for products with a weight of so many outputs: int32 zeros."""
    num_tiles = _ceil(num_outputs, OUTPUTS) * _ceil(MOST_ROWS, FEW_ROWS)
    return torch.zeros(num_tiles, dtype=torch.int32, device=device)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
