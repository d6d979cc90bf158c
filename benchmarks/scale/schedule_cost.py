"""Cost of a scheduling decision: `schedule()` and `apply()`, from 16 to 4,096 running sequences.

The real core with nothing around it, at pipeline depth 2 and with the prefix cache on. Its sequences have 2,048 tokens,
or a few less, so that in each step one of sixteen gets a new block; of a mix, half are samples of requests with n = 4.
Prints a table, writes JSON and a plot; takes about a minute.

    python -m benchmarks.scale.schedule_cost [--batches N ...] [--steps N] [--output FILE]
"""

import argparse
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Literal, TypeVar

from benchmarks.memory.saturated_pool import BLOCK_SIZE, WORKER
from benchmarks.page_section import (
    CORE,
    Document,
    Headline,
    PageSection,
    ResultRow,
    Section,
    Target,
    below,
    grid,
    number,
)
from benchmarks.report import RESULTS, percentile, table, write_result
from benchmarks.scale.growth import exponent_of
from benchmarks.svg_chart import Line, log_log_chart
from scheduler_svc.core import sequence as core
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.step_plan import StepPlan

T = TypeVar("T")
Workload = Literal["single", "mixed"]

NUM_TOKENS = 2048  # of each sequence
BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
WORKLOADS: tuple[Workload, ...] = ("single", "mixed")
BUDGET_BATCH = 256
BUDGET_MS = 0.5
MAX_EXPONENT = 1.05
WARM_UP_STEPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One row of the table: milliseconds of CPU of the calling thread, and wall time beside it."""

    workload: Workload
    batch: int  # running sequences
    schedule_p50_ms: float
    schedule_p99_ms: float
    schedule_wall_p50_ms: float
    schedule_p50_us_per_sequence: float
    apply_p50_ms: float
    apply_p99_ms: float
    offer_p50_ms: float  # cache_decoded_blocks, which the worker's loop calls while a step is executed
    offer_p99_ms: float


@dataclass(slots=True)
class Times:
    """Times of one call, step by step."""

    cpu_ns: list[int] = field(default_factory=list)
    wall_ns: list[int] = field(default_factory=list)

    def of(self, call: Callable[[], T]) -> T:
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        result = call()
        self.cpu_ns.append(time.thread_time_ns() - cpu_ns)
        self.wall_ns.append(time.perf_counter_ns() - wall_ns)
        return result


class DecodeLoop:
    """A scheduler whose sequences all decode, driven as a worker's loop drives it."""

    def __init__(self, workload: Workload, batch: int, max_steps: int) -> None:
        self.forget_times()
        self._batch = batch
        self._tokens = Random(batch)
        self._in_flight: deque[StepPlan] = deque()
        self._scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=batch * NUM_TOKENS, max_num_seqs=batch, watermark=0.0)
        )
        blocks_each = -(-(NUM_TOKENS + max_steps + 1) // BLOCK_SIZE) + 1
        self._scheduler.workers.add_worker(
            WORKER, num_blocks=batch * blocks_each, block_size=BLOCK_SIZE, num_seats=batch
        )
        for group in groups_of(workload, batch, max_steps + 1):
            self._scheduler.add(group)

    def forget_times(self) -> None:
        self.schedule, self.apply, self.offer = Times(), Times(), Times()

    def step(self) -> StepPlan:
        """One iteration: plan a step, bring the cache up to date, take the result of the step before.

        The first computes all prompts.
        """
        plan = self.schedule.of(lambda: self._scheduler.schedule(WORKER))
        assert plan is not None and len(plan.sampled_sequences) == self._batch, "every sequence gets a token"
        self._in_flight.append(plan)
        self.offer.of(lambda: self._scheduler.cache_decoded_blocks(WORKER))
        if len(self._in_flight) == 2:
            done = self._in_flight.popleft()
            tokens = self._tokens.choices(range(256), k=self._batch)
            self.apply.of(lambda: self._scheduler.apply(WORKER, done.step_id, tokens))
        return plan

    def check(self) -> None:
        """Assert the scheduler's invariants."""
        self._scheduler.check()


def groups_of(workload: Workload, batch: int, max_tokens: int) -> Iterator[core.SequenceGroup]:
    """`batch` sequences, a multiple of 8; of a mix four of eight are one request. No two prompts begin alike."""
    random = Random(batch)
    sizes = {"single": (1,) * 8, "mixed": (1, 1, 1, 1, 4)}[workload] * (batch // 8)
    seq_ids = count()
    for arrival, size in enumerate(sizes):
        prompt = [*divmod(arrival, 256), *random.choices(range(256), k=NUM_TOKENS - 2 - arrival % BLOCK_SIZE)]
        members = [
            core.Sequence(
                seq_id=next(seq_ids),
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                stop_token_ids=frozenset(),
            )
            for _ in range(size)
        ]
        yield core.SequenceGroup(members, arrival=arrival)


def measure(workload: Workload, batch: int, num_steps: int) -> Cost:
    """Prefills, warms up, and times `num_steps` steps."""
    loop = DecodeLoop(workload, batch, 1 + WARM_UP_STEPS + num_steps)
    for _ in range(1 + WARM_UP_STEPS):
        loop.step()
    loop.forget_times()
    gc.collect()
    for _ in range(num_steps):
        loop.step()
    schedule_p50_ms = _ms(loop.schedule.cpu_ns, 50)
    return Cost(
        workload=workload,
        batch=batch,
        schedule_p50_ms=schedule_p50_ms,
        schedule_p99_ms=_ms(loop.schedule.cpu_ns, 99),
        schedule_wall_p50_ms=_ms(loop.schedule.wall_ns, 50),
        schedule_p50_us_per_sequence=round(1000 * schedule_p50_ms / batch, 3),
        apply_p50_ms=_ms(loop.apply.cpu_ns, 50),
        apply_p99_ms=_ms(loop.apply.cpu_ns, 99),
        offer_p50_ms=_ms(loop.offer.cpu_ns, 50),
        offer_p99_ms=_ms(loop.offer.cpu_ns, 99),
    )


def growth_of(costs: Sequence[Cost]) -> float:
    """The exponent with which the cost grows with the batch, fitted over all batches; 1 is linear."""
    return exponent_of([(cost.batch, cost.schedule_p50_ms) for cost in costs])


def is_no_worse_than_linear(costs: Sequence[Cost]) -> bool:
    """True if growth is linear, with a margin for noise and because the sequences outgrow one cache after another."""
    return growth_of(costs) <= MAX_EXPONENT


def is_within_budget(costs: Sequence[Cost]) -> bool:
    """True if the budget's batch is within it, or was not measured."""
    return all(cost.schedule_p50_ms < BUDGET_MS for cost in costs if cost.batch == BUDGET_BATCH)


def plot(costs: Sequence[Cost]) -> str:
    """Draw the plot as SVG, with a linear line through the first point."""
    lines = []
    for workload in WORKLOADS:
        own = [cost for cost in costs if cost.workload == workload]
        lines.append(Line(f"schedule p50, {workload}", [(cost.batch, cost.schedule_p50_ms) for cost in own]))
        lines.append(Line(f"schedule p99, {workload}", [(cost.batch, cost.schedule_p99_ms) for cost in own]))
    single = [cost for cost in costs if cost.workload == "single"]
    lines.append(Line("apply p50, single", [(cost.batch, cost.apply_p50_ms) for cost in single]))
    first, last = single[0], single[-1]
    linear = (last.batch, first.schedule_p50_ms * last.batch / first.batch)
    lines.append(Line("linear", [(first.batch, first.schedule_p50_ms), linear], is_dashed=True))
    return log_log_chart(
        f"Cost of a decision, sequences of {NUM_TOKENS:,} tokens", "running sequences", "CPU, ms", lines
    )


def report(costs: Sequence[Cost]) -> None:
    head = ("workload", "batch", "p50 ms", "p99 ms", "wall p50", "us/seq", "apply p50", "apply p99")
    print(table((*head, "offer p50", "offer p99"), (astuple(cost) for cost in costs)))
    budget = "within" if is_within_budget(costs) else "OVER"
    print(f"{budget} the budget of {BUDGET_MS} ms p50 at {BUDGET_BATCH} sequences")
    for workload in WORKLOADS:
        own = [cost for cost in costs if cost.workload == workload]
        verdict = "no worse than linear" if is_no_worse_than_linear(own) else "WORSE than linear"
        print(f"{workload}: {verdict}; grows as batch ** {growth_of(own):.2f}")


def main() -> None:
    """Reads the command line and measures."""
    options = parse_arguments()
    costs = [measure(workload, batch, options.steps) for workload in WORKLOADS for batch in sorted(options.batches)]
    report(costs)
    by_workload = {workload: [cost for cost in costs if cost.workload == workload] for workload in WORKLOADS}
    figures = {
        "unit": "milliseconds of CPU of the calling thread; wall: of the clock",
        "tokens_per_sequence": NUM_TOKENS,
        "steps": options.steps,
        "budget": {"batch": BUDGET_BATCH, "schedule_p50_ms": BUDGET_MS, "is_within": is_within_budget(costs)},
        "is_no_worse_than_linear": {each: is_no_worse_than_linear(own) for each, own in by_workload.items()},
        "exponents": {each: round(growth_of(own), 3) for each, own in by_workload.items()},
        "rows": [asdict(cost) for cost in costs],
    }
    write_result(options.output, "schedule_cost", figures)
    options.output.with_suffix(".svg").write_text(plot(costs))


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the kept result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="at least two, multiples of 8")
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--output", type=Path, default=RESULTS / "schedule_cost.json")
    return parser.parse_args()


def _ms(times_ns: Sequence[int], percent: float) -> float:
    return round(percentile(times_ns, percent) / 1e6, 4)


def section_of(document: Document) -> Section:
    rows: list[ResultRow] = document["rows"]
    budget = document["budget"]
    worst_ms = max(
        (row["schedule_p50_ms"] for row in rows if row["batch"] == budget["batch"]),
        default=None,
    )
    exponents = ", ".join(f"{each:.3f} ({name})" for name, each in document["exponents"].items())
    is_linear = Target("no worse than linear", all(document["is_no_worse_than_linear"].values()))
    headlines = [Headline(f"grows with sequences to the power of {exponents}", [is_linear])]
    if worst_ms is not None:
        figure = f"{number(worst_ms, 3, budget['schedule_p50_ms'])} ms for a decision at {budget['batch']} sequences"
        headlines.insert(0, Headline(f"{figure}, p50", [below(worst_ms, budget["schedule_p50_ms"], "ms")]))
    keys = ("schedule_p50_ms", "schedule_p99_ms", "apply_p50_ms", "apply_p99_ms", "offer_p50_ms", "offer_p99_ms")
    head = ("requests", "sequences", *(key.removesuffix("_ms").replace("_", " ") for key in keys), "µs a sequence")
    return Section(
        done=(
            "The scheduler's core alone: every sequence decodes at "
            f"{document['tokens_per_sequence']:,} tokens, {document['steps']} steps of each batch. Milliseconds of CPU "
            "of the calling thread. *single*: requests of one sequence; of *mixed*, half are samples of requests with "
            "n = 4."
        ),
        headlines=headlines,
        blocks=[
            grid(
                head,
                [
                    (
                        row["workload"],
                        row["batch"],
                        *(f"{row[key]:.4f}" for key in keys),
                        row["schedule_p50_us_per_sequence"],
                    )
                    for row in rows
                ],
            )
        ],
        versions=(),
    )


SECTION = PageSection(
    kinds=("schedule_cost",),
    title="Cost of a decision",
    question="What does a decision of the scheduler cost, from 16 to 4,096 sequences?",
    command="python -m benchmarks.scale.schedule_cost",
    measures=CORE,
    target="< 0.5 ms at 256 sequences, no worse than linear",
    render=section_of,
)


if __name__ == "__main__":
    main()
