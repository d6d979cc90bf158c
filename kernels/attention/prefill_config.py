"""Launch configuration of prefill attention for each shape: rows and keys of a tile, warps, pipeline stages, and the
heads that are packed into a tile's rows.

Taken from the table of tuned shapes, else from a rule based on the compiler's report of registers and shared memory.
Imports no Triton.
"""

from dataclasses import dataclass

import torch

from kernels.attention.device_family import HOPPER, DeviceFamily
from kernels.attention.shape import AttentionShape
from kernels.attention.tuned_lookup import tuned_row

# A tile holds at least this many queries of each of its heads, so that few of its rows are padding (a fifth at most).
_MIN_QUERIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """One launch configuration of the kernel."""

    rows: int  # of a tile, each one query of one head; at least 64 for Hopper's matrix units
    tile: int  # keys per loop iteration
    num_warps: int
    num_stages: int

    def heads(self, shape: AttentionShape) -> int:
        """Number of a group's heads whose queries are rows of one tile: all, or equal parts if they are many."""
        parts = -(-shape.group * _MIN_QUERIES // self.rows)
        return -(-shape.group // parts)

    def queries(self, shape: AttentionShape) -> int:
        """Queries of each head in one tile."""
        return self.rows // self.heads(shape)


def prefill_config(shape: AttentionShape, family: DeviceFamily = HOPPER) -> PrefillConfig:
    """The configuration for a shape on a family of devices."""
    row = tuned_row("prefill", shape, family)
    if row is None:
        return prefill_rule(shape, family)
    return PrefillConfig(rows=row.rows, tile=row.tile, num_warps=row.num_warps, num_stages=row.num_stages)


def prefill_rule(shape: AttentionShape, family: DeviceFamily = HOPPER) -> PrefillConfig:
    """The configuration of a shape that was not tuned, by its dtypes and padded head dimension alone."""
    if shape.dtype == torch.float32:  # without tensor cores, so that products are exact
        return PrefillConfig(rows=32, tile=16, num_warps=8, num_stages=3)
    if shape.has_short_halves:
        return PrefillConfig(rows=32, tile=64, num_warps=4, num_stages=3)
    rows, tile = (64, 32) if shape.padded_dim > 128 else (128, 64)
    buffer_bytes = 2 * tile * shape.padded_dim * shape.kv_dtype.itemsize
    # Beside the buffers: queries of wide heads, as large as one, or those that asynchronous products read there, and
    # one buffer that such products still read.
    others = 2 if family.has_asynchronous_products else int(shape.padded_dim > 128)
    num_stages = next((each for each in (4, 3) if (each + others) * buffer_bytes <= family.program_bytes), 2)
    return PrefillConfig(rows=rows, tile=tile, num_warps=8, num_stages=num_stages)
