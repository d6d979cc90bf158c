"""Cost of a tensor-parallel group on one machine: a decode step, the share of it that reductions take, the messages.

A random model decodes at several numbers of rows, without services: by one process with all threads, and by a group
whose ranks share these threads, in turn. Reductions count from the call to the return on rank 0, including the wait for
the other ranks, which is shown apart. On a machine with other work a rank also waits while its peer has lost its core:
the tenth of the steps that took the least time shows what a step costs undisturbed.

    python -m benchmarks.cpu.tensor_parallel [--model 125m] [--dtype bfloat16] [--ranks 2] [--rows 1 8 32] [--rounds 5]
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.cpu.cpu_step import NUM_WARM_UP, SMALL_SHAPE, blocks_per_row, timed_steps
from benchmarks.page_section import (
    CPU_WORKER,
    Document,
    Headline,
    PageSection,
    ResultRow,
    Section,
    at_most,
    grid,
    number,
)
from benchmarks.random_models import SHAPES, ModelShape, write_random_model
from benchmarks.report import RESULTS, table, write_result
from kernels.native.shared_ranks import SharedRanks
from quire.worker_settings import WorkerSettings
from worker_svc.cpu.runner import CpuRunner
from worker_svc.loaded_model import LoadedModel
from worker_svc.ranks.lead_decoder import LeadDecoder
from worker_svc.start.loading import load_model

CONTEXT = 128
BLOCK_SIZE = 16
MOST_SHARE = 15.0  # per cent of a step, at the rows of the target
TARGET_ROWS = 32


class StepCost(NamedTuple):
    """One step, or medians of several."""

    step_ms: float
    reduce_share: float  # of the step, per cent
    wait_share: float  # part of that
    sent_bytes: float  # to each rank


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="125m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, TARGET_ROWS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of each kind in each round")
    parser.add_argument("--small", action="store_true", help="a tiny model: a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    shape = SMALL_SHAPE if options.small else SHAPES[options.model]
    with tempfile.TemporaryDirectory(prefix="quire-ranks-") as folder:
        write_random_model(shape, Path(folder), torch.device("cpu"), dtype=getattr(torch, options.dtype))
        figures = measure(Path(folder), options)
    head = [
        "rows",
        "one process, ms",
        "group, ms",
        "reductions, %",
        "of it waiting",
        "undisturbed, ms",
        "reductions, %",
    ]
    print(table(head, _cells(figures)))
    write_result(options.out / "tensor_parallel.json", "tensor_parallel", _document(shape, options, figures))


def measure(folder: Path, options: argparse.Namespace) -> list[ResultRow]:
    """One row for each number of rows, over the steps of all rounds."""
    num_threads = torch.get_num_threads()
    steps: dict[tuple[int, int], list[StepCost]] = {}
    for _ in range(options.rounds):
        for rows in options.rows:
            for num_ranks in (1, options.ranks):
                loaded = _load(folder, options, rows, num_ranks, num_threads)
                steps.setdefault((rows, num_ranks), []).extend(_step_costs(loaded, rows, options.steps))
                loaded.close()
    return [_figures(rows, steps[rows, 1], steps[rows, options.ranks]) for rows in options.rows]


def _load(folder: Path, options: argparse.Namespace, num_rows: int, num_ranks: int, num_threads: int) -> LoadedModel:
    settings = WorkerSettings(
        model=str(folder),
        device="cpu",
        dtype=options.dtype,
        threads=num_threads,
        block_size=BLOCK_SIZE,
        num_blocks=num_rows * blocks_per_row(CONTEXT, options.steps, BLOCK_SIZE),
        max_num_seqs=num_rows,
        max_batched_tokens=max(num_rows, CONTEXT),
        tensor_parallel=num_ranks,
    )
    return load_model(settings)


def _step_costs(loaded: LoadedModel, num_rows: int, num_steps: int) -> list[StepCost]:
    runner = loaded.runner
    assert isinstance(runner, CpuRunner), "on a CPU"
    lead = runner.model if isinstance(runner.model, LeadDecoder) else None
    ranks = lead.reduction if lead is not None else None
    assert ranks is None or isinstance(ranks, SharedRanks), "native kernels reduce through shared memory"
    costs = []
    before = _counts(lead, ranks)
    for step_ms in timed_steps(runner, num_rows, CONTEXT, num_steps, BLOCK_SIZE):
        now = _counts(lead, ranks)
        reduced_ns, waited_ns, sent_bytes = (later - earlier for later, earlier in zip(now, before, strict=True))
        costs.append(StepCost(step_ms, reduced_ns / 1e4 / step_ms, waited_ns / 1e4 / step_ms, sent_bytes))
        before = now
    return costs[NUM_WARM_UP:]


def _counts(lead: LeadDecoder | None, ranks: SharedRanks | None) -> tuple[int, int, int]:
    """Nanoseconds of reductions, and those of waiting, and bytes to each rank, so far."""
    if lead is None or ranks is None:
        return 0, 0, 0
    return ranks.nanoseconds, ranks.waited_nanoseconds, lead.group.sent_bytes


def _figures(rows: int, one: list[StepCost], group: list[StepCost]) -> ResultRow:
    typical, undisturbed = _median(group), _median(_undisturbed(group))
    return {
        "rows": rows,
        "one_ms": round(_median(one).step_ms, 3),
        "group_ms": round(typical.step_ms, 3),
        "reduce_share": round(typical.reduce_share, 2),
        "wait_share": round(typical.wait_share, 2),
        "undisturbed_one_ms": round(_median(_undisturbed(one)).step_ms, 3),
        "undisturbed_ms": round(undisturbed.step_ms, 3),
        "undisturbed_share": round(undisturbed.reduce_share, 2),
        "sent_bytes": round(typical.sent_bytes),
    }


def _median(costs: Sequence[StepCost]) -> StepCost:
    return StepCost(*(float(statistics.median(each)) for each in zip(*costs, strict=True)))


def _undisturbed(costs: Sequence[StepCost]) -> Sequence[StepCost]:
    """The tenth of the steps that took the least time: no other process had their cores."""
    return sorted(costs)[: -(-len(costs) // 10)]


def _cells(figures: list[ResultRow]) -> list[list[object]]:
    names = ("rows", "one_ms", "group_ms", "reduce_share", "wait_share", "undisturbed_ms", "undisturbed_share")
    return [[row[name] for name in names] for row in figures]


def _document(shape: ModelShape, options: argparse.Namespace, figures: list[ResultRow]) -> dict[str, Any]:
    return {
        "model": asdict(shape),
        "dtype": options.dtype,
        "ranks": options.ranks,
        "threads": torch.get_num_threads() * options.ranks,
        "context": CONTEXT,
        "rounds": options.rounds,
        "most_share": MOST_SHARE,
        "figures": figures,
    }


def section_of(document: Document) -> Section:
    rows: list[ResultRow] = document["figures"]
    most = document["most_share"]
    widest = max(rows, key=lambda row: row["rows"])
    share = widest["reduce_share"]
    target = [at_most(share, most, "%")] if widest["rows"] == TARGET_ROWS and document["ranks"] == 2 else []
    headline = Headline(
        f"at {widest['rows']} rows reductions take {number(share, 1, most)} % of a step, "
        f"{number(widest['undisturbed_share'], 1)} % of an undisturbed one",
        target,
    )
    return Section(
        done=(
            f"A random model decodes without services, by one process of {document['threads']} threads and by "
            f"{document['ranks']} ranks that share them, in turn. Medians over the steps of {document['rounds']} "
            f"rounds; context {document['context']}, {document['dtype']}. Waiting for the other rank counts as "
            "reduction: where other work runs on the machine, also while that rank has lost its core. Undisturbed: the "
            "tenth of the steps that took the least time."
        ),
        headlines=[headline],
        blocks=[
            grid(
                (
                    *("rows", "one process, ms", "group, ms", "reductions, %", "waiting, %"),
                    *("one process undisturbed, ms", "group, ms", "reductions, %", "bytes a step"),
                ),
                [
                    (
                        *(row["rows"], row["one_ms"], row["group_ms"], row["reduce_share"], row["wait_share"]),
                        *(
                            row["undisturbed_one_ms"],
                            row["undisturbed_ms"],
                            row["undisturbed_share"],
                            row["sent_bytes"],
                        ),
                    )
                    for row in rows
                ],
            )
        ],
        versions=("torch",),
    )


SECTION = PageSection(
    kinds=("tensor_parallel",),
    title="Tensor-parallel groups",
    question="Which share of a step do the reductions of a tensor-parallel group take on one machine?",
    command="python -m benchmarks.cpu.tensor_parallel",
    measures=(*CPU_WORKER, "benchmarks/cpu/tensor_parallel.py"),
    target="at most 15 % of a step of 32 rows at 2 ranks",
    render=section_of,
)


if __name__ == "__main__":
    main()
