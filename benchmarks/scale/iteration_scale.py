"""Cost of an iteration by running sequences: the scheduler's CPU, and the idle time of the worker."""

from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.overhead.overhead_table import Overhead, overhead_of
from benchmarks.services.steady_load import run_steadily
from benchmarks.services.step_trace import steady_steps
from benchmarks.services.traced_services import VOCAB_SIZE, Setting, traced_services

PROMPT_TOKENS = 32
STEP_MS, PER_SEQ_US = 8.0, 30.0  # of a step: long enough for both sides to be hidden behind it on two cores
WARM_UP_STEPS = 15
SPARE_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """Medians, in milliseconds; the CPU is a mean."""

    batch: int
    idle_at_depth_1_ms: float  # the worker between two executions
    idle_at_depth_2_ms: float
    scheduler_cpu_ms: float  # at depth 2, all threads


def measure_iterations(batches: Sequence[int], num_steps: int) -> list[Iteration]:
    """Measure with one start of all processes for each pipeline depth."""
    of_depth = {depth: _measure(depth, batches, num_steps) for depth in (1, 2)}
    return [
        Iteration(
            batch=batch,
            idle_at_depth_1_ms=of_depth[1][batch].worker_idle.p50,
            idle_at_depth_2_ms=of_depth[2][batch].worker_idle.p50,
            scheduler_cpu_ms=of_depth[2][batch].scheduler_cpu_ms,
        )
        for batch in batches
    ]


def _measure(depth: int, batches: Sequence[int], num_steps: int) -> dict[int, Overhead]:
    most = max(batches)
    num_tokens = WARM_UP_STEPS + num_steps + SPARE_STEPS
    setting = Setting(
        depth=depth,
        step_ms=STEP_MS,
        per_seq_us=PER_SEQ_US,
        max_num_seqs=most,
        max_batched_tokens=max(2048, 8 * most),
        num_blocks=max(4096, 32 * most),
    )
    with traced_services(setting) as services:
        for batch in batches:
            uvloop.run(run_steadily(services.address, batch, PROMPT_TOKENS, num_tokens, VOCAB_SIZE, on_read=_ignored))
        services.end()
    traces = (services.worker_steps, services.scheduler_steps)
    return {
        batch: overhead_of(steady_steps(*traces, batch=batch, warm_up=WARM_UP_STEPS, num_steps=num_steps))
        for batch in batches
    }


def _ignored(_: int) -> None: ...
