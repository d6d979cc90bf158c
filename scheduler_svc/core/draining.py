"""Workers that drain: which workers serve instead of them, and which groups are to leave them.

Pure functions over worker states. They move no group.
"""

from collections.abc import Iterable

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.worker_state import WorkerState


def serving_workers(workers: Iterable[WorkerState]) -> list[WorkerState]:
    """Return the workers that do not drain; if every worker drains, all of them."""
    workers = list(workers)
    return [worker for worker in workers if not worker.is_draining] or workers


def leaving_groups(workers: Iterable[WorkerState]) -> list[SequenceGroup]:
    """Return the groups that run or are swapped out on draining workers, each once. Parked ones leave by themselves."""
    draining = [worker for worker in workers if worker.is_draining]
    running = [sequence.group for worker in draining for sequence in worker.running]
    return list(dict.fromkeys([*running, *(group for worker in draining for group in worker.swapped)]))
