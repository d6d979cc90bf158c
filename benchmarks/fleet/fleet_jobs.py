"""Questions about a fleet, each answered by some simulations: one row of figures for each."""

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean

import structlog

from benchmarks.fleet.costs import FIXED_8_MS, GPU_8B, WorkerCosts, measured_gateway_token_s, measured_scheduler
from benchmarks.fleet.decision_cost import decisions_row
from benchmarks.fleet.fleet import WORKERS_COME_S, Fleet
from benchmarks.fleet.fleet_config import FleetConfig
from benchmarks.fleet.fleet_outcome import BUCKET_S, FleetOutcome
from benchmarks.paper.jobs import Job, Row
from benchmarks.report import percentile

QUESTIONS = ("three_shards", "saturation", "shards", "largest", "moves", "gateways", "start", "rack", "decisions")
ROWS = 100  # live requests a worker, where nothing else is said
RACK_FAILS_S = 2.0
SMALLER = 10  # of a quick look: all numbers divided by it


def jobs_of(question: str, *, is_quick: bool) -> list[Job]:
    """Jobs that answer a question, in a fixed order; those of a quick look take seconds."""
    jobs = _JOBS[question](SMALLER if is_quick else 1)
    return [Job(figure=job.figure, run=partial(_run_quietly, job.run), is_long=job.is_long) for job in jobs]


def _run_quietly(run: Callable[[], Row]) -> Row:
    """Run a job without what the product's code logs, and without garbage collections.

    While a fleet lives they find nothing: ended requests are freed by reference counts. What it was goes at its end.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    gc.disable()
    try:
        return run()
    finally:
        gc.enable()
        gc.collect()


def _three_shards(smaller: int) -> Iterator[Job]:
    for batch in (8, 32, 64):
        yield Job(figure="three_shards", run=partial(three_shards_row, batch))


def three_shards_row(batch: int) -> Row:
    """Compare three shards with one, of two workers each, with so many sequences a worker, as really measured."""
    rates = []
    for num_shards in (1, 3):
        config = FleetConfig(
            num_workers=2 * num_shards,
            num_shards=num_shards,
            num_clients=2 * num_shards * batch,
            worker=FIXED_8_MS,
            scheduler=measured_scheduler(),
            num_gateways=8,
            fixed_lengths=(32, 2000),
            seconds=6.0,
        )
        outcome = Fleet(config).run()
        rates.append((outcome.rate(2.0, 6.0), outcome.scheduler_busy_s / 4.0 / num_shards))
    (one, one_busy), (three, three_busy) = rates
    return {
        "batch": batch,
        "one": round(one, 1),
        "three": round(three, 1),
        "ratio": round(three / one, 3),
        "scheduler_busy_one": round(one_busy, 3),
        "scheduler_busy_three": round(three_busy, 3),
    }


def _saturation(smaller: int) -> Iterator[Job]:
    kinds: tuple[tuple[WorkerCosts, int, tuple[int, ...]], ...] = (
        (FIXED_8_MS, 8, (1, 4, 8, 10, 12, 16)),
        (FIXED_8_MS, 64, (1, 4, 8, 9, 10, 12, 16)),
        (GPU_8B, 32, (1, 4, 8, 9, 10, 12, 16)),
        (GPU_8B, ROWS, (1, 2, 3, 4, 5, 6, 8, 12, 16)),
        (GPU_8B, 200, (1, 2, 3, 4, 6, 8)),
    )
    for worker, rows, numbers in kinds:
        for number in numbers[: 2 if smaller > 1 else None]:
            yield Job(figure="saturation", run=partial(shard_row, worker, rows, number))


def shard_row(worker: WorkerCosts, rows: int, num_workers: int, factor: float = 1.0) -> Row:
    """Simulate one shard with so many workers and live requests on each. `factor`: of the scheduler's CPU time."""
    config = FleetConfig(
        num_workers=num_workers,
        num_shards=1,
        num_clients=num_workers * rows,
        worker=worker,
        scheduler=replace(measured_scheduler(), factor=factor),
        num_blocks=8192,
        ramp_s=1.0,
        warm_s=3.0,
        seconds=5.0,
    )
    outcome = Fleet(config).run()
    return {"worker": worker.name, "rows": rows, "factor": factor, **_figures(config, outcome)}


def _shards(smaller: int) -> Iterator[Job]:
    numbers = (4, 8, 12, 16, 20, 25, 33, 50)
    for num_shards in numbers if smaller == 1 else (1, 2, 3, 5):
        config = FleetConfig(
            num_workers=100 // smaller,
            num_shards=num_shards,
            num_clients=100 * ROWS // smaller,
            worker=GPU_8B,
            scheduler=measured_scheduler(),
            ramp_s=0.75,
            warm_s=2.5,
            seconds=4.0,
        )
        yield Job(figure="shards", run=partial(fleet_row, config))


def _largest(smaller: int) -> Iterator[Job]:
    config = FleetConfig(
        num_workers=1000 // smaller,
        num_shards=300 // smaller,
        num_clients=1000 * ROWS // smaller,
        worker=GPU_8B,
        scheduler=measured_scheduler(),
        num_gateways=64,
        warm_s=1.0,
        seconds=1.5,
        is_timed=True,
    )
    yield Job(figure="largest", run=partial(fleet_row, config), is_long=True)


def fleet_row(config: FleetConfig) -> Row:
    """Simulate one fleet."""
    return _figures(config, Fleet(config).run())


def _moves(smaller: int) -> Iterator[Job]:
    slower = WorkerCosts(
        name="twice the model",
        step_s=2 * GPU_8B.step_s,
        row_s=2 * GPU_8B.row_s,
        prompt_token_s=2 * GPU_8B.prompt_token_s,
        context_token_s=2 * GPU_8B.context_token_s,
    )
    num_workers = 10 if smaller == 1 else 2
    for worker, rows, factor in (
        (GPU_8B, ROWS, 1.0),
        (GPU_8B, ROWS, 0.5),
        (GPU_8B, ROWS, 0.25),
        (GPU_8B, 50, 1.0),
        (GPU_8B, 200, 1.0),
        (slower, ROWS, 1.0),
    ):
        yield Job(figure="moves", run=partial(shard_row, worker, rows, num_workers, factor))


def _gateways(smaller: int) -> Iterator[Job]:
    for number in (1, 2, 4, 8, 10, 12, 16, 24):
        config = FleetConfig(
            num_workers=24 // min(smaller, 8),
            num_shards=8 // min(smaller, 8),
            num_clients=24 * ROWS // min(smaller, 8),
            worker=GPU_8B,
            scheduler=measured_scheduler(),
            num_gateways=number,
            gateway_token_s=measured_gateway_token_s(),
            ramp_s=1.0,
            warm_s=4.0,
            seconds=6.0,
        )
        yield Job(figure="gateways", run=partial(fleet_row, config))


def _start(smaller: int) -> Iterator[Job]:
    for num_workers, num_shards in ((100, 10), (1000, 100), (1000, 300)):
        yield Job(figure="start", run=partial(start_row, num_workers // smaller, max(2, num_shards // smaller)))


def start_row(num_workers: int, num_shards: int) -> Row:
    """Start everything at once: when all shards are led, evenly, and when workers are spread evenly."""
    config = FleetConfig(
        num_workers=num_workers,
        num_shards=num_shards,
        num_clients=0,
        worker=GPU_8B,
        scheduler=measured_scheduler(),
        is_cold=True,
        seconds=45.0,
    )
    fleet = Fleet(config)
    all_led_s = even_s = first_s = None
    for moment_s in fleet.moments(BUCKET_S):
        if all_led_s is None and all(shard.led is not None for shard in fleet.shards):
            all_led_s = moment_s
        if all_led_s is not None and even_s is None and max(len(each.leading) for each in fleet.processes) == 1:
            even_s = moment_s
        if first_s is None and all(worker.is_driven for worker in fleet.workers):
            first_s = moment_s
            counts = sorted(shard.num_members for shard in fleet.shards)
    return {
        "num_workers": num_workers,
        "num_shards": num_shards,
        "all_led_s": all_led_s,
        "one_each_s": even_s,
        "all_serve_s": None if first_s is None else first_s - WORKERS_COME_S,
        "least_then": counts[0] if first_s is not None else None,
        "most_then": counts[-1] if first_s is not None else None,
        "num_moves": fleet.outcome.num_moves,
        "last_move_s": round(max(0.0, fleet.outcome.last_move_s - WORKERS_COME_S), 2),
        "is_even": fleet.is_settled,
    }


def _rack(smaller: int) -> Iterator[Job]:
    for num_workers, num_shards, seconds in ((1000, 100, 13.0), (300, 100, 11.0)):  # until all that was hit goes on
        config = FleetConfig(
            num_workers=num_workers // smaller,
            num_shards=num_shards // smaller,
            num_clients=num_workers * ROWS // smaller,
            worker=GPU_8B,
            scheduler=measured_scheduler(),
            num_gateways=64 // smaller,
            warm_s=1.25,
            rack_fails_s=RACK_FAILS_S,
            seconds=seconds,
            is_timed=True,
        )
        yield Job(figure="rack", run=partial(rack_row, config), is_long=True)


def _decisions(smaller: int) -> Iterator[Job]:
    for num_shards in (3, 100, 300):
        yield Job(figure="decisions", run=partial(decisions_row, num_shards))


def rack_row(config: FleetConfig) -> Row:
    """Lose a rack: what clients see before, meanwhile and afterwards."""
    assert config.rack_fails_s is not None, "a rack that fails"
    fleet, failed_s = Fleet(config), config.rack_fails_s
    num_workers = sum(worker.rack == 0 for worker in fleet.workers)
    num_leaders = sum(process.rack == 0 for process in fleet.processes)
    outcome = fleet.run()
    buckets = range(round(config.warm_s / BUCKET_S), round(config.seconds / BUCKET_S))
    before = outcome.rate(config.warm_s, failed_s)
    after = outcome.rate(config.seconds - 2.0, config.seconds)
    return {
        **_figures(config, outcome),
        "workers_lost": num_workers,
        "schedulers_lost": num_leaders,
        "tokens_per_s_before": round(before),
        "tokens_per_s_after": round(after),
        "least_tokens_per_s": round(min(outcome.tokens[bucket] for bucket in buckets) / BUCKET_S),
        "requests_hit": len(outcome.stalls_s) + fleet.num_stalled,
        "requests_still_waiting": fleet.num_stalled,
        "stall_p50_s": _rounded(percentile(outcome.stalls_s, 50)),
        "stall_p99_s": _rounded(percentile(outcome.stalls_s, 99)),
        "stall_max_s": _rounded(max(outcome.stalls_s)),
        "lost_tokens": outcome.num_lost_tokens,
        "num_moves": outcome.num_moves,
        "last_move_s": round(max(0.0, outcome.last_move_s - failed_s), 2),
        "requests_killed": outcome.num_killed,
        "ttft_p99_before_s": _rounded(outcome.first_token(99, config.warm_s, failed_s)),
        "ttft_p99_after_s": _rounded(outcome.first_token(99, failed_s, config.seconds)),
        "most_led_by_one": max(len(process.leading) for process in fleet.processes),
        "rates": [[bucket * BUCKET_S, round(outcome.tokens[bucket] / BUCKET_S)] for bucket in buckets],
    }


def _figures(config: FleetConfig, outcome: FleetOutcome) -> Row:
    span_s = config.seconds - config.warm_s
    row: Row = {
        "num_workers": config.num_workers,
        "num_shards": config.num_shards,
        "num_clients": config.num_clients,
        "num_gateways": config.num_gateways,
        "tokens_per_s": round(outcome.rate(config.warm_s, config.seconds)),
        "ttft_p50_s": _rounded(outcome.first_token(50)),
        "ttft_p99_s": _rounded(outcome.first_token(99)),
        "token_ms": _rounded(1e3 * fmean(outcome.token_s), 2) if outcome.token_s else None,
        "rows_a_step": round(outcome.num_rows / max(1, outcome.num_steps), 1),
        "scheduler_busy": round(outcome.scheduler_busy_s / span_s / config.num_processes, 3),
        "worker_busy": round(outcome.worker_busy_s / span_s / config.num_workers, 3),
        "num_submitted": outcome.num_submitted,
        "num_ended": outcome.num_ended,
    }
    if config.is_timed:
        row["host"] = {"core_us_a_row": round(1e6 * outcome.core_cpu_s / max(1, outcome.num_answered_rows), 2)}
    return row


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


_JOBS = {
    "three_shards": _three_shards,
    "saturation": _saturation,
    "shards": _shards,
    "largest": _largest,
    "moves": _moves,
    "gateways": _gateways,
    "start": _start,
    "rack": _rack,
    "decisions": _decisions,
}
