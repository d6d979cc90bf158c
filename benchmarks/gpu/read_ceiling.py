"""The bandwidth at which a device's memory can be read, measured: the ceiling of everything that reads weights and KV.

The best of several reductions, as none is the best everywhere: torch's, and the Triton sum that is the ceiling of
`benchmarks.gpu.kernels`.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor

from benchmarks.gpu.kernel_bench.ceilings import READ_SHAPES, sum_kernel

Reduction = tuple[Callable[[], object], int]  # and how many bytes it reads

_CUDA_BYTES = 4 << 30  # far beyond any cache
_CPU_BYTES = 256 << 20
_ROW = 8192
_REPEATS = 15


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second; on a GPU by its own clock. The memory it took is another process's again when it returns."""
    best = _best_bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return best


def _best_bandwidth(device: torch.device) -> float:
    num_bytes = _CUDA_BYTES if device.type == "cuda" else _CPU_BYTES
    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    clock = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    return max(num_read / _median_seconds(run, clock) for run, num_read in _reductions(data))


def _reductions(data: Tensor) -> Iterator[Reduction]:
    rows = data.view(-1, _ROW)
    vector = torch.ones(_ROW, dtype=torch.float32, device=data.device)
    yield data.sum, data.nbytes
    yield data.amax, data.nbytes
    yield lambda: rows.sum(1), data.nbytes
    yield lambda: torch.mv(rows, vector), data.nbytes
    if data.device.type == "cuda":
        num_processors = torch.cuda.get_device_properties(data.device).multi_processor_count
        for tile, warps, programs_per_processor in READ_SHAPES:
            yield _triton_sum(data, num_processors * programs_per_processor, tile, warps)


def _triton_sum(data: Tensor, num_programs: int, tile: int, warps: int) -> Reduction:
    """Sum everything except a rest that fills no whole round of the programs."""
    num_tiles = data.numel() // (num_programs * tile)
    out = torch.empty(num_programs, device=data.device)

    def run() -> None:
        sum_kernel[(num_programs,)](data, out, num_tiles, TILE=tile, num_warps=warps, enable_fp_fusion=True)

    return run, 4 * num_tiles * num_programs * tile


def _median_seconds(run: Callable[[], object], clock: Callable[[Callable[[], object]], float]) -> float:
    run()  # the first time compiles and allocates
    return median(clock(run) for _ in range(_REPEATS))


def _cuda_seconds(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _cpu_seconds(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s
