"""Incidents of one group: failed steps and lost workers since it last made progress past the position of one."""

from collections import Counter
from dataclasses import dataclass, field

from scheduler_svc.core.sequence import Sequence


@dataclass(slots=True)
class Incidents:
    """Record of one group, kept until it is cleared or ends."""

    failed_on: Counter[str] = field(default_factory=Counter)  # failed steps by worker
    disbelieved_on: set[str] = field(default_factory=set)  # of those workers, where the answer could not be believed
    num_losses: int = 0  # of workers
    num_lone_losses: int = 0  # latest losses in a row in which it was alone
    num_excused_losses: int = 0  # beside num_losses: it had not yet recomputed up to its position
    marks: dict[Sequence, int] = field(default_factory=dict)  # tokens computed with which it is past the position
    loss_positions: dict[Sequence, int] = field(default_factory=dict)  # the first position that may have ended a worker

    @property
    def num_failed_steps(self) -> int:
        return self.failed_on.total()
