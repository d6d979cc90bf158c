"""What an iteration costs beside the execution of its step, at several batch sizes and pipeline depths.

Real processes: the scheduler with its journal on the embedded Valkey (fsync on every write), a worker that only
simulates execution, and this one as the client, which reads every request's stream through one `Session`. Prints a
table and writes JSON.

    python -m benchmarks.step_overhead [--batches N ...] [--depths N ...] [--steps N] [--repeats N] [--output FILE]
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from benchmarks.overhead_table import Overhead, overhead_of, print_rows, print_verdicts, row_of
from benchmarks.processes import describe_valkey, embedded_valkey, started
from benchmarks.report import RESULTS, ROOT, write_result
from benchmarks.step_trace import SchedulerMoments, WorkerMoments, read_trace, steady_steps
from quire import AsyncClient

TOKENIZER = ROOT / "demo" / "model"
VOCAB_SIZE = 2048  # of that tokenizer
PROMPT_TOKENS = 128
MAX_TOKENS = 8000  # more than any request comes to
MAX_BATCHED_TOKENS = 2048
WARM_UP_STEPS = 50
SPARE_STEPS = 5
STEP_MS_OF_DEPTH = {1: 5.0, 2: 8.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one set of processes is to measure."""

    depth: int
    step_ms: float
    batches: tuple[int, ...]
    num_steps: int


def measure(plan: Plan, data_dir: Path | None, profile: Path | None = None) -> dict[int, Overhead]:
    """Starts everything, runs the batches one after another, and reads the traces. By batch."""
    with tempfile.TemporaryDirectory(prefix="quire-overhead-") as folder:
        traces = Path(folder)
        with embedded_valkey(data_dir) as store, running(plan, store, traces, profile) as address:
            uvloop.run(run_batches(plan, address))
        worker = read_trace(WorkerMoments, traces / "worker")
        scheduler = read_trace(SchedulerMoments, traces / "scheduler")
    return {
        batch: overhead_of(
            steady_steps(worker, scheduler, batch=batch, warm_up=WARM_UP_STEPS, num_steps=plan.num_steps)
        )
        for batch in plan.batches
    }


@contextmanager
def running(plan: Plan, store: str, traces: Path, profile: Path | None) -> Iterator[str]:
    """Scheduler and worker, ready; yields the scheduler's address. After the block they have written their traces."""
    num_seqs = ("--max-num-seqs", str(max(plan.batches)))
    flags = ["--listen", "127.0.0.1:0", "--store", store, "--pipeline-depth", str(plan.depth), *num_seqs]
    flags += ["--max-batched-tokens", str(MAX_BATCHED_TOKENS)]
    own = [*(("--profile", str(profile)) if profile is not None else ()), str(traces / "scheduler")]
    with started("benchmarks.traced_scheduler", *own, "--", *flags) as scheduler:
        address = str(scheduler.wait_for("listening")["address"])
        flags = ["--scheduler", address, "--step-ms", str(plan.step_ms), "--trace", str(traces / "worker"), *num_seqs]
        flags += ["--tokenizer", str(TOKENIZER), "--vocab-size", str(VOCAB_SIZE)]
        with started("benchmarks.simulated_worker", *flags) as worker:
            scheduler.wait_for("worker ready")
            yield address
            worker.end()
        scheduler.end()


async def run_batches(plan: Plan, address: str) -> None:
    """One batch after another, each until there are steps enough with all of its requests."""
    async with AsyncClient(address) as client:
        await client.wait_ready(10.0)
        for batch in plan.batches:
            readers = Readers(client, batch, WARM_UP_STEPS + plan.num_steps + SPARE_STEPS)
            async with asyncio.TaskGroup() as tasks:
                for prompt in prompts(batch):
                    tasks.create_task(readers.read(prompt))


class Readers:
    """Readers of requests that run at the same time. Each leaves `num_tokens` after the last has begun."""

    def __init__(self, client: AsyncClient, num_readers: int, num_tokens: int) -> None:
        self._client = client
        self._num_waiting = num_readers  # for their first token
        self._num_tokens = num_tokens

    async def read(self, prompt: list[int]) -> None:
        """One request."""
        num_left = self._num_tokens
        has_begun = False
        async with self._client.stream(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) as stream:
            async for chunk in stream:
                if not has_begun:
                    has_begun = True
                    self._num_waiting -= 1
                if not self._num_waiting:
                    num_left -= chunk.num_tokens
                if num_left <= 0:
                    return
        raise RuntimeError("a request ended before there were steps enough")


def prompts(batch: int) -> list[list[int]]:
    """Random, so that they share no prefix, and always the same."""
    generator = random.Random(batch)
    return [[generator.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]


def main() -> None:
    """Reads the command line and measures."""
    options = parse_arguments()
    plans = [
        Plan(
            depth=depth,
            step_ms=options.step_ms or STEP_MS_OF_DEPTH[depth],
            batches=tuple(options.batches),
            num_steps=options.steps,
        )
        for depth in options.depths
    ]
    repeats: dict[tuple[int, int], list[Overhead]] = {}
    for number in range(1, options.repeats + 1):
        for plan in plans:
            print(f"repeat {number} of {options.repeats}, depth {plan.depth}", flush=True)
            for batch, overhead in measure(plan, options.data_dir, options.profile).items():
                repeats.setdefault((plan.depth, batch), []).append(overhead)
    step_ms_of_depth = {plan.depth: plan.step_ms for plan in plans}
    rows = [row_of(depth, batch, step_ms_of_depth[depth], each) for (depth, batch), each in sorted(repeats.items())]
    print_rows(rows)
    if options.profile is not None:
        print(f"under the profiler everything takes longer; see {options.profile}. No result is kept.")
        return
    print_verdicts(rows)
    figures = {
        "server": describe_valkey(options.data_dir),
        "steps_per_repeat": options.steps,
        "warm_up_steps": WARM_UP_STEPS,
        "prompt_tokens": PROMPT_TOKENS,
        "unit": "milliseconds",
    }
    write_result(options.output, "step_overhead", {**figures, "rows": [asdict(row) for row in rows]})


def parse_arguments() -> argparse.Namespace:
    """Defaults are those of the kept result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2], choices=(1, 2))
    parser.add_argument("--steps", type=int, default=1000, help="steady steps of each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-ms", type=float, help="time of a step; default: 5 at depth 1, 8 at depth 2")
    parser.add_argument("--data-dir", type=Path, help="where Valkey keeps its file; default: in memory")
    parser.add_argument("--profile", type=Path, help="profile the scheduler into this file; no result is kept")
    parser.add_argument("--output", type=Path, default=RESULTS / "step_overhead.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
