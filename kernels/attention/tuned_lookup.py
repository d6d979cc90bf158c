"""Looks up the tuned launch configuration of an attention shape on a family of devices, if there is one.

The table is `tuned`, written by `benchmarks.gpu.tune_kernels`; a shape without an entry is launched by a rule.
Compiles nothing, measures nothing, and imports no Triton.
"""

from typing import Literal, NamedTuple

import torch

from kernels.attention.device_family import DeviceFamily
from kernels.attention.shape import AttentionShape
from kernels.attention.tuned import ROWS

AttentionKernel = Literal["decode", "prefill", "prefix"]


class TunedRow(NamedTuple):
    """One entry: its kernel and shape, the launch configuration, and the resources and time of the kernel."""

    kernel: str
    family: str  # of devices
    group: int  # heads that share a key-value head
    head_dim: int
    bits: int  # of an element of queries, and of keys
    kv_bits: int
    rows: int  # of a tile: queries, or heads of a group
    tile: int  # keys per loop iteration
    num_warps: int
    num_stages: int
    programs_per_sm: int  # that fit into a multiprocessor at once, by registers and shared memory
    registers: int  # per thread
    shared_bytes: int  # per program
    us: float | None  # measured, the mean of its workloads; None if chosen by the compiler's report


_BY_KEY = {row[:6]: TunedRow(*row) for row in ROWS}


def tuned_row(kernel: AttentionKernel, shape: AttentionShape, family: DeviceFamily) -> TunedRow | None:
    """The entry of a shape, of the device's own capability if there is one, else of the nearest family.

    Shapes of float32, which is for exact products and not for speed, have none.
    """
    if shape.dtype == torch.float32:
        return None
    bits, kv_bits = 8 * shape.dtype.itemsize, 8 * shape.kv_dtype.itemsize
    keys = ((kernel, name, shape.group, shape.head_dim, bits, kv_bits) for name in family.names)
    return next((_BY_KEY[key] for key in keys if key in _BY_KEY), None)
