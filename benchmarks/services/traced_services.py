"""Scheduler, worker and journal as real processes that note what each step costs them; the worker only simulates.

Knows how to start, read and end them; not what is asked of them.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import ROOT
from benchmarks.services.processes import Process, embedded_valkey, started
from benchmarks.services.stage_spans import Span, read_spans
from benchmarks.services.step_trace import SchedulerMoments, WorkerMoments, read_trace
from scheduler_svc.journal.redis_link import RedisLink, pack

TOKENIZER = ROOT / "demo" / "model"
SCHEDULER = "benchmarks.services.traced_scheduler"
WORKER = "benchmarks.services.simulated_worker"
VOCAB_SIZE = 2048  # of that tokenizer
MAX_BATCHED_TOKENS = 2048
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Setting of the services."""

    depth: int
    step_ms: float
    max_num_seqs: int
    per_seq_us: float = 0.0
    has_spans: bool = False
    max_batched_tokens: int = MAX_BATCHED_TOKENS
    num_blocks: int = 32_768
    profile: Path | None = None
    data_dir: Path | None = None  # where Valkey keeps its file; None: in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSeconds:
    """CPU time of each process so far, all threads."""

    scheduler: float
    worker: float
    store: float


class Services:
    """Services that run until the block of `traced_services` ends; then their traces can be read."""

    def __init__(self, setting: Setting, folder: Path, store: str, scheduler: Process, worker: Process) -> None:
        self.address = ""
        self._setting = setting
        self._folder = folder
        self._store = store
        self._scheduler = scheduler
        self._worker = worker
        self.worker_steps: list[WorkerMoments] = []
        self.scheduler_steps: list[SchedulerMoments] = []
        self.worker_spans: list[Span] = []
        self.scheduler_spans: list[Span] = []

    def cpu(self) -> CpuSeconds:
        return CpuSeconds(
            scheduler=self._scheduler.cpu_s(), worker=self._worker.cpu_s(), store=asyncio.run(_cpu_s_of(self._store))
        )

    def end(self) -> None:
        """Ends both, in peace, and reads what they noted."""
        self._worker.end()
        self._scheduler.end()
        self.worker_steps = read_trace(WorkerMoments, self._folder / "worker")
        self.scheduler_steps = read_trace(SchedulerMoments, self._folder / "scheduler")
        if self._setting.has_spans:
            self.worker_spans = read_spans(self._folder / "worker-spans")
            self.scheduler_spans = read_spans(self._folder / "scheduler-spans")


@contextmanager
def traced_services(setting: Setting) -> Iterator[Services]:
    """Ready to serve; what is left of them after the block is ended."""
    with tempfile.TemporaryDirectory(prefix="quire-overhead-") as name, embedded_valkey(setting.data_dir) as store:
        folder = Path(name)
        with started(SCHEDULER, *_scheduler_arguments(setting, folder, store)) as scheduler:
            address = str(scheduler.wait_for("listening")["address"])
            with started(WORKER, *_worker_arguments(setting, folder, address)) as worker:
                scheduler.wait_for("worker ready")
                services = Services(setting, folder, store, scheduler, worker)
                services.address = address
                yield services


def _scheduler_arguments(setting: Setting, folder: Path, store: str) -> list[str]:
    own = ["--spans", str(folder / "scheduler-spans")] if setting.has_spans else []
    own += ["--profile", str(setting.profile)] if setting.profile is not None else []
    flags = {
        "--listen": "127.0.0.1:0",
        "--store": store,
        "--pipeline-depth": setting.depth,
        "--max-num-seqs": setting.max_num_seqs,
        "--max-batched-tokens": setting.max_batched_tokens,
        "--max-queue-requests": max(1000, 2 * setting.max_num_seqs),
        "--drain-timeout-s": 0,  # what its readers have let go of may not have heard of it yet
    }
    if setting.has_spans:  # so that every iteration has all stages
        flags["--stream-interval-ms"] = 0
    return [*own, str(folder / "scheduler"), "--", *_words(flags)]


def _worker_arguments(setting: Setting, folder: Path, address: str) -> list[str]:
    flags = {
        "--scheduler": address,
        "--step-ms": setting.step_ms,
        "--per-seq-us": setting.per_seq_us,
        "--trace": folder / "worker",
        "--tokenizer": TOKENIZER,
        "--vocab-size": VOCAB_SIZE,
        "--max-num-seqs": setting.max_num_seqs,
        "--max-batched-tokens": setting.max_batched_tokens,
        "--num-blocks": setting.num_blocks,
        "--block-size": _BLOCK_SIZE,
    }
    return [*_words(flags), *(["--spans", str(folder / "worker-spans")] if setting.has_spans else [])]


def _words(flags: dict[str, object]) -> list[str]:
    return [str(word) for flag in flags.items() for word in flag]


async def _cpu_s_of(store: str) -> float:
    link = RedisLink(store, timeout_s=5.0, repeatable=True)
    try:
        answer = (await link.call(pack("INFO", "cpu"))).decode()
    finally:
        await link.close()
    seconds = dict(line.split(":", 1) for line in answer.splitlines() if ":" in line)
    return float(seconds["used_cpu_user"]) + float(seconds["used_cpu_sys"])
