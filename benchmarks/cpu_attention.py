"""How fast a CPU attends to keys and values in blocks: decode steps of a small model as share of the read bandwidth.

Each step attends in every layer, whose blocks are its own and scattered, so that no cache holds them between steps.
The bandwidth is measured in the same process, with the same threads. Writes JSON; a table to the terminal.

    python -m benchmarks.cpu_attention [--output FILE] [--quick] [--kernels native|torch]
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.read_ceiling import read_bandwidth
from benchmarks.report import RESULTS, table, write_result
from kernels.attention.paged_attention import RaggedRows
from kernels.native.cpu_kernels import CacheShape, CpuKernels, layer_caches
from kernels.native.native_kernels import choose_kernels

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 12, 4, 64, 16, 12
CONTEXTS, BATCHES = (512, 2048), (1, 8, 32)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MIN_STEPS, _MIN_SECONDS = 5, 0.4


@dataclass(frozen=True, slots=True)
class Figure:
    """One batch at one context."""

    dtype: str
    context: int
    batch: int
    layer_ms: float  # median over steps
    gb_per_s: float
    percent_of_bandwidth: float


class DecodeSteps:
    """A pool of blocks and a batch of rows that each attend to `context` keys."""

    def __init__(self, kernels: CpuKernels, context: int, batch: int, dtype: torch.dtype) -> None:
        self._kernels = kernels
        shape = CacheShape(
            num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype=dtype
        )
        blocks_per_row = context // BLOCK_SIZE
        generator = torch.Generator().manual_seed(context + batch)
        sides = (NUM_LAYERS, 2, shape.side_numel)
        block = torch.randn(sides, generator=generator).to(dtype)
        pool = block.expand(batch * blocks_per_row, *sides).contiguous()
        self.num_bytes = pool.nbytes
        self._caches = layer_caches(pool, shape)
        tables = torch.randperm(batch * blocks_per_row, generator=generator).view(batch, -1).to(torch.int32)
        starts = torch.arange(batch + 1, dtype=torch.int32)
        self._rows = RaggedRows(starts, torch.full((batch,), context, dtype=torch.int32), tables, 1, context)
        self._query = torch.randn(batch, NUM_HEADS * HEAD_DIM, generator=generator).to(dtype)
        self._out = torch.empty_like(self._query)

    def run(self) -> None:
        """One step: a plan, and every layer's attention."""
        plan = self._kernels.plan(self._rows, self._caches[0], None)
        for cache in self._caches:
            self._kernels.attend(self._query, cache, plan, HEAD_DIM**-0.5, self._out)

    def median_seconds(self) -> float:
        """Of enough steps to be sure of."""
        self.run()
        times: list[float] = []
        while len(times) < _MIN_STEPS or sum(times) < _MIN_SECONDS:
            began_s = time.perf_counter()
            self.run()
            times.append(time.perf_counter() - began_s)
        return median(times)


def measure(kernels: CpuKernels, bandwidth: float, contexts: tuple[int, ...]) -> Iterator[Figure]:
    """All batches and contexts."""
    for name, dtype in DTYPES.items():
        for context in contexts:
            for batch in BATCHES:
                steps = DecodeSteps(kernels, context, batch, dtype)
                seconds = steps.median_seconds()
                rate = steps.num_bytes / seconds
                yield Figure(
                    name,
                    context,
                    batch,
                    round(seconds / NUM_LAYERS * 1e3, 4),
                    round(rate / 1e9, 2),
                    round(100 * rate / bandwidth, 1),
                )


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu_attention.json")
    parser.add_argument("--kernels", choices=("native", "torch"), default="native")
    parser.add_argument("--quick", action="store_true", help="only the shorter context")
    arguments = parser.parse_args()
    kernels, _ = choose_kernels(arguments.kernels, torch.float32)
    contexts = CONTEXTS[:1] if arguments.quick else CONTEXTS
    before = read_bandwidth(torch.device("cpu"))
    figures = list(measure(kernels, before, contexts))
    after = read_bandwidth(torch.device("cpu"))
    rows = [(f.dtype, f.context, f.batch, f.layer_ms, f.gb_per_s, f.percent_of_bandwidth) for f in figures]
    print(table(("dtype", "context", "batch", "ms/layer", "GB/s", "% of read bandwidth"), rows))
    print(f"read bandwidth {before / 1e9:.1f} GB/s, afterwards {after / 1e9:.1f}; {kernels.name}")
    write_result(
        arguments.output,
        "cpu_attention",
        {
            "kernels": kernels.name,
            "threads": torch.get_num_threads(),
            "read_gb_per_s": round(before / 1e9, 2),
            "read_gb_per_s_afterwards": round(after / 1e9, 2),
            "figures": [asdict(figure) for figure in figures],
        },
    )


if __name__ == "__main__":
    main()
