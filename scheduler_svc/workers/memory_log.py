"""Log lines about the workers' KV memory, for operators: one a minute for each worker in use.

Reads the scheduler's statistics and knows nothing else; the caller gives the time.
"""

import structlog

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_stats import WorkerCounters

log = structlog.get_logger()

EVERY_S = 60.0


class MemoryLog:
    """One line for each worker on which something runs or is swapped out. Counters run from the worker's arrival."""

    def __init__(self) -> None:
        self._next_s: float | None = None  # None before the first call

    def write_if_due(self, now_s: float, scheduler: Scheduler) -> None:
        """Write the lines if it is time; the statistics are made only then."""
        if self._next_s is None:
            self._next_s = now_s + EVERY_S
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        for worker in scheduler.stats().workers:
            if worker.num_running or worker.num_used_host_blocks:
                _write(worker)


def _write(worker: WorkerCounters) -> None:
    log.info(
        "memory",
        worker_id=worker.worker_id,
        num_running=worker.num_running,
        num_blocks=worker.num_blocks,
        num_used_blocks=worker.num_used_blocks,
        num_free_blocks=worker.num_free_blocks,
        num_cached_blocks=worker.num_cached_blocks,
        num_pinned_blocks=worker.num_pinned_blocks,
        num_shared_blocks=worker.num_shared_blocks,
        num_saved_blocks=worker.num_saved_blocks,
        num_used_host_blocks=worker.num_used_host_blocks,
        num_preemptions=worker.num_preemptions,
        num_swaps=worker.num_swaps,
        num_copied_blocks=worker.num_copied_blocks,
        num_recomputed_tokens=worker.num_recomputed_tokens,
    )
