"""Launch configuration of prefill attention for each shape: rows and keys of a tile, warps, pipeline stages, and the
heads that are packed into a tile's rows.

Taken from the table of tuned shapes, else from a rule based on the compiler's report of registers and shared memory.
Imports no Triton.
"""

from dataclasses import dataclass, replace

import torch

from kernels.attention.device_family import HOPPER, DeviceFamily
from kernels.attention.shape import AttentionShape
from kernels.attention.tuned_lookup import tuned_row

# A tile holds at least this many queries of each of its heads, so that few of its rows are padding (a fifth at most).
_MIN_QUERIES = 4
_WIDE_BYTES = 103_000  # shared memory for heads of more than 128 with five stages


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """One launch configuration of the kernel."""

    rows: int  # of a tile, each one query of one head; at least 64 for Hopper's matrix units
    tile: int  # keys per loop iteration
    num_warps: int
    num_stages: int
    # Values are multiplied while the weights of the next tile of keys are computed. That takes registers, and is of use
    # where products are asynchronous.
    late_values: bool = True

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
    config = prefill_rule(shape, family)
    if row is not None:
        config = PrefillConfig(rows=row.rows, tile=row.tile, num_warps=row.num_warps, num_stages=row.num_stages)
    return replace(config, late_values=family.has_asynchronous_products)


def prefill_rule(shape: AttentionShape, family: DeviceFamily = HOPPER) -> PrefillConfig:
    """The configuration of a shape that was not tuned, by its dtypes and padded head dimension alone."""
    if shape.dtype == torch.float32:  # without tensor cores, so that products are exact
        return PrefillConfig(rows=32, tile=16, num_warps=8, num_stages=3)
    if shape.padded_dim > 128:
        return PrefillConfig(rows=64, tile=32, num_warps=8, num_stages=5 if family.program_bytes >= _WIDE_BYTES else 4)
    return PrefillConfig(rows=128, tile=64, num_warps=8, num_stages=5)
