"""Prompts that are computed for their KV alone: no client, no journal, no output.

The scheduler queues, runs, preempts and moves them like requests; the one token that each samples is discarded. Knows
nothing of why a prompt is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.sampling_params import SequenceSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceGroup

SAMPLING = SequenceSampling(seed=0, temperature=0.0)


@dataclass(slots=True, eq=False)
class Computation:
    """Callbacks of one computation: exactly one of the two is called, once."""

    on_computed: Callable[[str], None]  # with the worker, where its blocks are cached at that moment
    on_failed: Callable[[str], None]  # with the reason


class Computations:
    """Computations by group, until computed, failed or cancelled. A group has one sequence, with `max_tokens` 1."""

    def __init__(
        self, scheduler: Scheduler, sampling_of: dict[int, SequenceSampling], wake_workers: Callable[[], None]
    ) -> None:
        self._scheduler = scheduler
        self._wake_workers = wake_workers
        self._sampling_of = sampling_of  # the engine's, by seq_id
        self._computations: dict[SequenceGroup, Computation] = {}

    def __len__(self) -> int:
        return len(self._computations)

    def start(self, group: SequenceGroup, computation: Computation) -> None:
        """Queue a group and wake the workers. A shutdown does not wait for it."""
        self._computations[group] = computation
        self._sampling_of[group.sequences[0].seq_id] = SAMPLING
        self._scheduler.add(group)
        self._wake_workers()

    def cancel(self, group: SequenceGroup) -> None:
        """End a computation without a callback. Harmless if it has ended."""
        if group in self._computations:
            self._end(group)
        self._wake_workers()  # its blocks may let others run

    def take_results(self, worker_id: str, appended: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """End the computations that got their token; return the tokens of other sequences."""
        others = []
        for sequence, token_id in appended:
            if sequence.group not in self._computations:
                others.append((sequence, token_id))
            else:
                self._end(sequence.group).on_computed(worker_id)
        return others

    def fail_group(self, group: SequenceGroup, error: str) -> None:
        """Fail the computation of a group. Raises KeyError if the group has none."""
        self._end(group).on_failed(error)

    def _end(self, group: SequenceGroup) -> Computation:
        """Take a group out of the scheduler; its blocks stay cached, without a holder."""
        self._scheduler.finish_group(group)
        del self._sampling_of[group.sequences[0].seq_id]
        self._scheduler.forget_group(group)
        return self._computations.pop(group)
