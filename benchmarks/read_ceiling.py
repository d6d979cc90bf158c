"""The bandwidth at which a device's memory can be read, measured: the ceiling of everything that reads weights and KV.

The best of several reductions, as none is the best everywhere. Knows no kernel of ours.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

_CUDA_BYTES = 4 << 30  # far beyond any cache
_CPU_BYTES = 256 << 20
_ROW = 8192
_REPEATS = 15


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second; on a GPU by its own clock. The memory it took is another process's again when it returns."""
    num_bytes = _CUDA_BYTES if device.type == "cuda" else _CPU_BYTES
    best_s = _best_seconds(device, num_bytes)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return num_bytes / best_s


def _best_seconds(device: torch.device, num_bytes: int) -> float:
    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    rows = data.view(-1, _ROW)
    vector = torch.ones(_ROW, dtype=torch.float32, device=device)
    reductions: tuple[Callable[[], Tensor], ...] = (
        data.sum,
        data.amax,
        lambda: rows.sum(1),
        lambda: torch.mv(rows, vector),
    )
    clock = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    return min(median(clock(reduction) for _ in range(_REPEATS)) for reduction in reductions)


def _cuda_seconds(run: Callable[[], Tensor]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _cpu_seconds(run: Callable[[], Tensor]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s
