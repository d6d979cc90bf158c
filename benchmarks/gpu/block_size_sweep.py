"""Latency by block size, in the form of the paper's Fig. 18b: normalised latency.

Real services for each block size, a random model, requests with the lengths of ShareGPT and of Alpaca all sent at
once, and a KV pool of as many token slots as the paper had for OPT-13B: what a block size wastes are sequences that
have to wait. Small blocks cost the attention kernels, large ones memory. The result is written after every size, so
that a sweep that is cut short keeps what it has. Writes JSON and SVG.

    python -m benchmarks.gpu.block_size_sweep [--sizes N ...] [--requests N] [--limit-s S] [--out DIR]
    python -m benchmarks.gpu.block_size_sweep --device cpu --small    # the demo model: a smoke test
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import uvloop

from benchmarks.gpu.decode_step import DEMO_MODEL, model_folder
from benchmarks.gpu.length_load import LoadOutcome, LoadRequest, requests_of, run_load
from benchmarks.lengths import Dataset
from benchmarks.page_section import GPU_WORKER, PageSection
from benchmarks.random_models import SHAPES, ModelShape, default_device
from benchmarks.report import RESULTS, table, write_result
from benchmarks.services.model_services import SMOKE_TEST, Deployment, serving
from benchmarks.svg_chart import Line, log_log_chart

SIZES = (16, 1, 256, 32, 8, 128, 4, 64, 2)  # in the order of what they tell
POOL_SLOTS = 15_728  # tokens: 12 GiB of 800 KiB each, as the paper had
DATASETS: tuple[Dataset, ...] = ("sharegpt", "alpaca")
TARGET_BLOCK_SIZE = 16  # the paper's choice, and ours
_SMALL_LEN = 16
_SMALL_SLOTS = 2048
_OVERHEAD_S = 5.0  # of a size, beside its measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One block size on one trace."""

    block_size: int
    dataset: Dataset
    normalised_latency_ms: float  # mean over requests of latency / output tokens
    tokens_per_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings that all sizes share."""

    model: Path
    device: str
    dtype: str
    num_slots: int
    max_num_seqs: int
    requests: dict[Dataset, list[LoadRequest]]


def measure(plan: Plan, block_size: int) -> list[Row]:
    """Measure one size on all traces, one after another on the same services."""
    deployment = Deployment(
        model=plan.model,
        device=plan.device,
        dtype=plan.dtype,
        max_num_seqs=plan.max_num_seqs,
        max_batched_tokens=2048,
        worker_flags=("--block-size", str(block_size), "--num-blocks", str(plan.num_slots // block_size)),
    )
    with serving(deployment) as site:
        return [
            row_of(block_size, dataset, uvloop.run(run_load(site.address, requests)))
            for dataset, requests in plan.requests.items()
        ]


def row_of(block_size: int, dataset: Dataset, outcome: LoadOutcome) -> Row:
    return Row(
        block_size=block_size,
        dataset=dataset,
        normalised_latency_ms=round(1e3 * outcome.normalised_latency_s, 3),
        tokens_per_s=round(outcome.tokens_per_s, 1),
        seconds=round(outcome.seconds, 2),
    )


def chart(rows: Sequence[Row]) -> str:
    """Draw Fig. 18b."""
    lines = [
        Line(dataset, sorted((row.block_size, row.normalised_latency_ms) for row in rows if row.dataset == dataset))
        for dataset in DATASETS
    ]
    return log_log_chart("Normalised latency by block size", "block size", "ms a token", lines)


def latency_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """By trace: the latency at our block size / at the best of all sizes."""
    ratios: dict[str, float] = {}
    for dataset in DATASETS:
        latencies = {row.block_size: row.normalised_latency_ms for row in rows if row.dataset == dataset}
        if TARGET_BLOCK_SIZE in latencies:
            ratios[dataset] = round(latencies[TARGET_BLOCK_SIZE] / min(latencies.values()), 3)
    return ratios


def main() -> None:
    """Reads the command line and measures size after size, while there is time."""
    options = parse_arguments()
    end_s = time.monotonic() + options.limit_s
    rows: list[Row] = []
    longest_s = 0.0
    with model_folder(DEMO_MODEL if options.small else options.model, options.shape, options.device) as model:
        plan = plan_of(options, model)
        for block_size in options.sizes:
            began_s = time.monotonic()
            if rows and began_s + longest_s + _OVERHEAD_S > end_s:
                break
            rows += measure(plan, block_size)
            longest_s = max(longest_s, time.monotonic() - began_s)
            write(options, plan, rows)
            print(f"block size {block_size} took {time.monotonic() - began_s:.0f} s", flush=True)
    report(rows, options.sizes)
    if options.small:
        print(SMOKE_TEST)


def plan_of(options: argparse.Namespace, model: Path) -> Plan:
    num_requests, max_len = (4, _SMALL_LEN) if options.small else (options.requests, None)
    vocab_size = ModelShape.of(model).vocab_size
    return Plan(
        model=model,
        device=str(options.device),
        dtype="float32" if options.small else "bfloat16",
        num_slots=_SMALL_SLOTS if options.small else POOL_SLOTS,
        max_num_seqs=16 if options.small else 256,
        requests={dataset: requests_of(dataset, num_requests, vocab_size, max_len) for dataset in DATASETS},
    )


def write(options: argparse.Namespace, plan: Plan, rows: Sequence[Row]) -> None:
    measured = {row.block_size for row in rows}
    figures = {
        "key_figures": {f"block_16_over_best_{dataset}": ratio for dataset, ratio in latency_ratios(rows).items()},
        "is_smoke_test": options.small,
        "pool_slots": plan.num_slots,
        "num_requests": {dataset: len(requests) for dataset, requests in plan.requests.items()},
        "dtype": plan.dtype,
        "shape": asdict(ModelShape.of(plan.model)),
        "sizes_without_time": [size for size in options.sizes if size not in measured],
        "rows": [asdict(row) for row in sorted(rows, key=lambda row: (row.dataset, row.block_size))],
    }
    write_result(options.out / "block_size_sweep.json", "block_size_sweep", figures)
    (options.out / "block_size_sweep.svg").write_text(chart(rows))


def report(rows: Sequence[Row], sizes: Sequence[int]) -> None:
    head = ("lengths", "block size", "ms a token, p. request", "output tokens/s", "seconds")
    in_order = sorted(rows, key=lambda row: (row.dataset, row.block_size))
    cells = [
        (row.dataset, row.block_size, row.normalised_latency_ms, row.tokens_per_s, row.seconds) for row in in_order
    ]
    print(table(head, cells))
    print(f"block size {TARGET_BLOCK_SIZE} against the best: {latency_ratios(rows)}")
    if left := [size for size in sizes if size not in {row.block_size for row in rows}]:
        print(f"no time was left for {left}")


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the kept result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=default_device(), help="default: what there is")
    parser.add_argument("--small", action="store_true", help="demo model and few short requests: a smoke test")
    parser.add_argument("--model", type=Path, help="a LLaMA checkpoint; default: a random one of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--requests", type=int, default=128, help="of each trace")
    parser.add_argument("--limit-s", type=float, default=900.0, help="no further size is begun when it is near")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    return parser.parse_args()


SECTION = PageSection(
    kinds=("block_size_sweep",),
    title="Block sizes on a GPU",
    question="What does the block size do to latency (Fig. 18b)?",
    command="python -m benchmarks.gpu.block_size_sweep --out DIR",
    measures=GPU_WORKER,
    target="as in Fig. 18b",
)


if __name__ == "__main__":
    main()
