"""Workers that drain: who serves instead of them, and who is still there and is to move.

Pure functions over worker states. Nothing here moves anybody.
"""

from collections.abc import Iterable

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.worker_state import WorkerState


def serving_workers(workers: Iterable[WorkerState]) -> list[WorkerState]:
    """Those that do not drain; all, if there are only such."""
    workers = list(workers)
    return [worker for worker in workers if not worker.is_draining] or workers


def leaving_groups(workers: Iterable[WorkerState]) -> list[SequenceGroup]:
    """Groups that run or are swapped out on workers that drain, each once. Who is parked follows by itself."""
    draining = [worker for worker in workers if worker.is_draining]
    running = [sequence.group for worker in draining for sequence in worker.running]
    return list(dict.fromkeys([*running, *(group for worker in draining for group in worker.swapped)]))


def num_sequences_on(worker: WorkerState) -> int:
    """Those that run there, and those that are preempted and still bound to it."""
    kept = dict.fromkeys([*worker.parked, *worker.swapped])
    return len(worker.running) + sum(len(group.live) for group in kept)
