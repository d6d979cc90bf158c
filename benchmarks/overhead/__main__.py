"""Overhead of an iteration beside the execution of its step, stage by stage, and the delay of readers.

Real processes: the scheduler with its journal on the embedded Valkey (fsync on every write), a worker that only
simulates execution, and this one as the client, which reads every request's stream through one `Session`. Prints
tables and writes JSON, in which a short form of the results of earlier commits is kept.

    python -m benchmarks.overhead [--parts steps stages delivery] [--batches N ...] [--depths N ...] [--output FILE]

`steps` are the figures that count, with a note or two a step; `stages` takes the same apart, with each step's tokens
delivered by themselves, which costs more the more sequences there are; `delivery` keeps a full batch of requests coming
and going, and looks how late their tokens are.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import uvloop

from benchmarks.overhead.delivery_load import Delivery, Load, delivery_of, run_load
from benchmarks.overhead.delivery_table import CpuPerToken, delivery_row, print_delivery
from benchmarks.overhead.overhead_table import (
    Overhead,
    Row,
    overhead_of,
    print_rows,
    print_verdicts,
    row_of,
    summary_of,
)
from benchmarks.overhead.stage_table import Spans, print_stages, stages_of
from benchmarks.report import RESULTS
from benchmarks.result_history import Figures, write_with_history
from benchmarks.services.client_probes import Reads, probed_client
from benchmarks.services.processes import describe_valkey
from benchmarks.services.stage_spans import SpanLog, span_cost_ns
from benchmarks.services.steady_load import run_steadily
from benchmarks.services.step_trace import SteadySteps, steady_steps
from benchmarks.services.traced_services import VOCAB_SIZE, Services, Setting, traced_services

PROMPT_TOKENS = 128
OUTPUT_TOKENS = (256, 512)  # of requests that come and go
WARM_UP_STEPS = 50
SPARE_STEPS = 5
PARTS = ("steps", "stages", "delivery")


def run_batches(setting: Setting, batches: Sequence[int], num_steps: int, log: SpanLog | None = None) -> Services:
    """Start everything, run the batches one after another, and return the services with their traces."""
    reads = Reads()
    num_tokens = WARM_UP_STEPS + num_steps + SPARE_STEPS
    with traced_services(setting) as services, nullcontext() if log is None else probed_client(log, reads):
        for batch in batches:
            uvloop.run(run_steadily(services.address, batch, PROMPT_TOKENS, num_tokens, VOCAB_SIZE, reads.record_chunk))
        services.end()
    return services


def steady(services: Services, batch: int, num_steps: int) -> SteadySteps:
    """Steady steps, which count for the figures."""
    steps = (services.worker_steps, services.scheduler_steps)
    return steady_steps(*steps, batch=batch, warm_up=WARM_UP_STEPS, num_steps=num_steps)


def measure_steps(options: argparse.Namespace) -> Figures:
    """Each repeat starts all processes anew; the rows are medians of the repeats."""
    repeats: dict[tuple[int, int], list[Overhead]] = {}
    for number in range(1, options.repeats + 1):
        for depth in options.depths:
            print(f"steps: repeat {number} of {options.repeats}, depth {depth}", flush=True)
            services = run_batches(_setting(options, depth, max(options.batches)), options.batches, options.steps)
            for batch in options.batches:
                overhead = overhead_of(steady(services, batch, options.steps))
                repeats.setdefault((depth, batch), []).append(overhead)
    rows: list[Row] = [row_of(*key, options.step_ms, each) for key, each in sorted(repeats.items())]
    print_rows(rows)
    print_verdicts(rows)
    return {"steps_per_repeat": options.steps, "warm_up_steps": WARM_UP_STEPS, "rows": [asdict(row) for row in rows]}


def measure_stages(options: argparse.Namespace) -> Figures:
    """Measure one run for each depth and batch, with spans around all stages."""
    cost_ns = span_cost_ns()
    tables = []
    for depth in options.depths:
        for batch in options.batches:
            print(f"stages: depth {depth}, batch {batch}", flush=True)
            log = SpanLog()
            services = run_batches(_setting(options, depth, batch, has_spans=True), [batch], options.steps, log)
            spans = Spans(services.scheduler_spans, services.worker_spans, log.spans, cost_ns)
            steps = steady(services, batch, options.steps)
            stages = stages_of(spans, steps)
            idle_ms = overhead_of(steps).worker_idle
            print_stages(f"depth {depth}, batch {batch}: the worker is idle for {idle_ms.p50} ms (p50)", stages)
            tables.append(
                {
                    "depth": depth,
                    "batch": batch,
                    "worker_idle": asdict(idle_ms),
                    "stages": [asdict(stage) for stage in stages],
                }
            )
    return {"span_cost_ns": cost_ns, "tables": tables}


def measure_delivery(options: argparse.Namespace) -> Figures:
    """Measure a full batch at depth 2, with requests that start and end."""
    load = Load(
        num_readers=options.readers,
        seconds=options.seconds,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        vocab_size=VOCAB_SIZE,
    )
    print(f"delivery: {options.readers} readers for {options.seconds:g} s", flush=True)
    with traced_services(_setting(options, 2, options.readers)) as services:
        before, own_s = services.cpu(), time.process_time()
        received = uvloop.run(run_load(services.address, load))
        own_s, after = time.process_time() - own_s, services.cpu()
        services.end()
    delivery: Delivery = delivery_of(load, services.worker_steps, received)
    cpu = CpuPerToken.of(before, after, client_s=own_s, num_tokens=sum(received.num_tokens))
    print_delivery(delivery, cpu)
    return delivery_row(load, options.step_ms, delivery, cpu)


def main() -> None:
    """Reads the command line and measures."""
    options = parse_arguments()
    measure = {"steps": measure_steps, "stages": measure_stages, "delivery": measure_delivery}
    parts = {part: measure[part](options) for part in options.parts}
    if options.profile is not None:
        print(f"under the profiler everything takes longer; see {options.profile}. No result is kept.")
        return
    figures = {
        "server": describe_valkey(options.data_dir),
        "prompt_tokens": PROMPT_TOKENS,
        "unit": "milliseconds, where nothing else is said",
    }
    write_with_history(options.output, "overhead", figures, parts, summary_of)


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the kept result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2], choices=(1, 2))
    parser.add_argument("--steps", type=int, default=300, help="steady steps of each repeat")
    parser.add_argument("--repeats", type=int, default=3, help="of `steps`")
    parser.add_argument("--step-ms", type=float, default=8.0, help="time of a step")
    parser.add_argument("--readers", type=int, default=256, help="of `delivery`")
    parser.add_argument("--seconds", type=float, default=30.0, help="of `delivery`")
    parser.add_argument("--data-dir", type=Path, help="where Valkey keeps its file; default: in memory")
    parser.add_argument("--profile", type=Path, help="profile the scheduler into this file; no result is kept")
    parser.add_argument("--output", type=Path, default=RESULTS / "overhead.json")
    return parser.parse_args()


def _setting(options: argparse.Namespace, depth: int, num_seqs: int, *, has_spans: bool = False) -> Setting:
    return Setting(
        depth=depth,
        step_ms=options.step_ms,
        max_num_seqs=num_seqs,
        has_spans=has_spans,
        profile=options.profile,
        data_dir=options.data_dir,
    )


if __name__ == "__main__":
    main()
