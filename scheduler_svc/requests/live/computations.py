"""Prompts that are computed for their KV alone: no client, no journal, no output.

They wait, run, are preempted and move as requests do, by the scheduler's rules; the one token that each samples is
thrown away. It knows nothing of why something is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.slot_sampling import SlotSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceGroup

SAMPLING = SlotSampling(seed=0, temperature=0.0)


@dataclass(slots=True, eq=False)
class Computation:
    """What becomes of it is told once, by one of the two."""

    on_computed: Callable[[str], None]  # on this worker; its blocks are cached there at that moment
    on_failed: Callable[[str], None]  # for this reason


class Computations:
    """By group, until they are computed, failed or cancelled. Groups have one sequence, with `max_tokens` 1."""

    def __init__(self, scheduler: Scheduler, sampling_of: dict[int, SlotSampling]) -> None:
        self._scheduler = scheduler
        self._sampling_of = sampling_of  # the engine's, by seq_id
        self._computations: dict[SequenceGroup, Computation] = {}

    def __len__(self) -> int:
        return len(self._computations)

    def start(self, group: SequenceGroup, computation: Computation) -> None:
        """Queues it. Who calls wakes the workers."""
        self._computations[group] = computation
        self._sampling_of[group.sequences[0].seq_id] = SAMPLING
        self._scheduler.add(group)

    def cancel(self, group: SequenceGroup) -> None:
        """Nobody is told. Harmless if it has ended."""
        if group in self._computations:
            self._end(group)

    def take(self, worker_id: str, appended: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Ends those that got their token, and returns the tokens of everybody else."""
        others = []
        for sequence, token_id in appended:
            if sequence.group not in self._computations:
                others.append((sequence, token_id))
            else:
                self._end(sequence.group).on_computed(worker_id)
        return others

    def fail(self, group: SequenceGroup, error: str) -> None:
        """Gives it up. It is one of these."""
        self._end(group).on_failed(error)

    def _end(self, group: SequenceGroup) -> Computation:
        """Its blocks are cached from now on, and nobody's."""
        self._scheduler.finish_group(group)
        del self._sampling_of[group.sequences[0].seq_id]
        self._scheduler.forget_group(group)
        return self._computations.pop(group)
