"""Incidents of one group: failed steps and lost workers since it last made progress past the position of one."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile

from scheduler_svc.core.sequence import Sequence

NUM_LOSSES_OF_SUSPECTS = 2


@dataclass(slots=True)
class Loss:
    """Loss of a worker with the group in flight there."""

    worker_id: str
    was_alone: bool
    is_proven: bool  # the group may be its cause; else the worker's process may live, and only its link have broken


@dataclass(slots=True)
class Incidents:
    """Record of one group, kept until it is cleared or ends."""

    failed_on: Counter[str] = field(default_factory=Counter)  # failed steps by worker
    disbelieved_on: set[str] = field(default_factory=set)  # of those workers, where the answer could not be believed
    losses: list[Loss] = field(default_factory=list)
    num_excused_losses: int = 0  # beside those: it had not yet recomputed up to its position, or the worker lived on
    marks: dict[Sequence, int] = field(default_factory=dict)  # tokens computed with which it is past the position
    loss_positions: dict[Sequence, int] = field(default_factory=dict)  # the first position that may have ended a worker

    @property
    def num_failed_steps(self) -> int:
        return self.failed_on.total()

    @property
    def num_losses(self) -> int:
        return len(self.losses)

    @property
    def num_lone_losses(self) -> int:
        """Latest losses in a row in which it was alone."""
        return sum(1 for _ in takewhile(lambda loss: loss.was_alone, reversed(self.losses)))

    @property
    def is_suspicious(self) -> bool:
        """True if the group is to be tried apart."""
        return bool(self.failed_on) or self.num_losses >= NUM_LOSSES_OF_SUSPECTS
