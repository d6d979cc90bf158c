"""Speed of attention over blocks on a CPU: decode steps of a small model as share of the read bandwidth.

Each step attends in every layer, whose blocks are its own and scattered. Steps take turns with reading a large array by
the same threads, which is the bandwidth that a step is compared with, and which leaves no block in a cache. Both lie in
memory as the worker's KV pool does.

    python -m benchmarks.cpu.cpu_attention [--output FILE] [--dtype float32|bfloat16] [--context N]
        [--kernels native|torch]
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch

from benchmarks.page_section import Document, Headline, PageSection, ResultRow, Section, at_least, grid
from benchmarks.report import RESULTS, table, write_result
from kernels.attention.paged_attention import RaggedRows
from kernels.native.cpu_kernels import CacheShape, CpuKernels, layer_caches
from kernels.native.host_memory import zeros_as_used
from kernels.native.native_kernels import choose_kernels

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 12, 4, 64, 16, 12
CONTEXTS, BATCHES = (512, 2048), (1, 8, 32)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ARRAY_BYTES = 256 << 20  # far beyond any cache
_ROW = 8192
LONG_CONTEXT, FULL_BATCH = 2048, 32  # the shape whose share of the read bandwidth has a target
LEAST_PERCENT = {"float32": 65, "bfloat16": 50}
_MIN_STEPS, _MIN_SECONDS = 7, 0.6


@dataclass(frozen=True, slots=True)
class Figure:
    """One batch at one context; medians."""

    dtype: str
    context: int
    batch: int
    layer_ms: float
    gb_per_s: float
    read_gb_per_s: float
    percent_of_bandwidth: float


class LargeArray:
    """Array that is read between steps, in the quickest way that torch has."""

    def __init__(self) -> None:
        self._rows = zeros_as_used((_ARRAY_BYTES // 4 // _ROW, _ROW), torch.float32).fill_(1.0)
        self._vector = torch.ones(_ROW)
        ways: tuple[Callable[[], object], ...] = (
            lambda: self._rows.sum(),
            lambda: self._rows.amax(),
            lambda: torch.mv(self._rows, self._vector),
        )
        self._read = min(ways, key=lambda read: median(_seconds(read) for _ in range(5)))

    def seconds(self) -> float:
        """Seconds to read it once."""
        return _seconds(self._read)


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
        pool = zeros_as_used((batch * blocks_per_row, *sides), dtype)
        pool.copy_(torch.randn(sides, generator=generator))
        self.num_bytes = pool.nbytes
        self._caches = layer_caches(pool, shape)
        tables = torch.randperm(batch * blocks_per_row, generator=generator).view(batch, -1).to(torch.int32)
        starts = torch.arange(batch + 1, dtype=torch.int32)
        self._rows = RaggedRows(starts, torch.full((batch,), context, dtype=torch.int32), tables, 1, context)
        self._query = torch.randn(batch, NUM_HEADS * HEAD_DIM, generator=generator).to(dtype)
        self._out = torch.empty_like(self._query)

    def run(self) -> None:
        """Run one step: a plan, and every layer's attention."""
        plan = self._kernels.plan(self._rows, self._caches[0], None)
        for cache in self._caches:
            self._kernels.attend(self._query, cache, plan, HEAD_DIM**-0.5, self._out)


def measure(kernels: CpuKernels, dtypes: Iterable[str], contexts: Iterable[int]) -> Iterator[Figure]:
    """Yield the figures of all batches, for each dtype and context."""
    array = LargeArray()
    for name, context, batch in product(dtypes, contexts, BATCHES):
        steps = DecodeSteps(kernels, context, batch, DTYPES[name])
        steps.run()
        times: list[float] = []
        reads: list[float] = []
        while len(times) < _MIN_STEPS or sum(times) < _MIN_SECONDS:
            reads.append(array.seconds())
            times.append(_seconds(steps.run))
        seconds, bandwidth = median(times), _ARRAY_BYTES / median(reads)
        rate = steps.num_bytes / seconds
        yield Figure(
            name,
            context,
            batch,
            round(seconds / NUM_LAYERS * 1e3, 4),
            round(rate / 1e9, 2),
            round(bandwidth / 1e9, 2),
            round(100 * rate / bandwidth, 1),
        )


def _seconds(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu_attention.json")
    parser.add_argument("--kernels", choices=("native", "torch"), default="native")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--context", type=int, action="append", help="default: 512 and 2048")
    arguments = parser.parse_args()
    kernels, _ = choose_kernels(arguments.kernels, torch.float32)
    figures = list(measure(kernels, arguments.dtype or DTYPES, arguments.context or CONTEXTS))
    rows = [list(asdict(figure).values()) for figure in figures]
    print(table(("dtype", "context", "batch", "ms/layer", "GB/s", "read GB/s", "% of it"), rows))
    shape = f"{NUM_LAYERS} layers, {NUM_HEADS} heads, {NUM_KV_HEADS} KV heads of {HEAD_DIM}, blocks of {BLOCK_SIZE}"
    write_result(
        arguments.output,
        "cpu_attention",
        {
            "kernels": kernels.name,
            "threads": torch.get_num_threads(),
            "shape": shape,
            "figures": [asdict(figure) for figure in figures],
        },
    )


def section_of(document: Document) -> Section:
    rows: list[ResultRow] = document["figures"]
    headlines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        own = [row["percent_of_bandwidth"] for row in rows if row["dtype"] == dtype]
        headlines.append(Headline(f"{dtype}: {min(own):g} to {max(own):g} % of the read bandwidth"))
        headlines += [
            Headline(
                f"{dtype}, context {LONG_CONTEXT:,}, batch {FULL_BATCH}: {row['percent_of_bandwidth']:g} %",
                [at_least(row["percent_of_bandwidth"], LEAST_PERCENT[dtype], "%")],
            )
            for row in rows
            if (row["dtype"], row["context"], row["batch"]) == (dtype, LONG_CONTEXT, FULL_BATCH)
        ]
    head = ("dtype", "context", "batch", "ms a layer", "GB/s", "read bandwidth, GB/s", "% of it")
    keys = ("dtype", "context", "batch", "layer_ms", "gb_per_s", "read_gb_per_s", "percent_of_bandwidth")
    return Section(
        done=(
            "Decode steps attend to scattered blocks, in turn with reading a large array by the same threads. "
            f"{document['shape']}; kernels: {document['kernels']}; {document['threads']} threads."
        ),
        headlines=headlines,
        blocks=[grid(head, [[row[key] for key in keys] for row in rows])],
        versions=("torch",),
    )


SECTION = PageSection(
    kinds=("cpu_attention",),
    title="Attention on a CPU",
    question="How near does attention over blocks come to the read bandwidth?",
    command="python -m benchmarks.cpu.cpu_attention",
    measures=("kernels/native", "benchmarks/cpu/cpu_attention.py"),
    target="at context 2,048 and batch 32: 65 % in float32, 50 % in bfloat16",
    render=section_of,
)


if __name__ == "__main__":
    main()
