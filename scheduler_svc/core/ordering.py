"""In which order groups are served: by priority class, and within it by policy.

Pure functions. The last in order is the first to give way.
"""

from math import inf
from typing import Literal

from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus

OrderPolicy = Literal["fcfs", "edf"]  # first come, first served; earliest deadline first


def running_rank(policy: OrderPolicy, group: SequenceGroup) -> tuple[float, ...]:
    """Among those that run or are swapped out. Without a deadline a group comes after all that have one."""
    if policy == "fcfs":
        return (group.priority, group.arrival)
    return (group.priority, inf if group.deadline_s is None else group.deadline_s, group.arrival)


def newcomers_rank(policy: OrderPolicy, priority: int, deadline_s: float | None) -> tuple[float, ...]:
    """That of a group which comes now: who is served before it ranks below."""
    if policy == "fcfs":
        return (priority, inf)
    return (priority, inf if deadline_s is None else deadline_s, inf)


def waiting_rank(policy: OrderPolicy, group: SequenceGroup) -> tuple[float, ...]:
    """Among those that wait: what was preempted is not overtaken by what came after it with an earlier deadline."""
    if policy == "edf" and any(s.status is SequenceStatus.PREEMPTED for s in group.live):
        return (group.priority, -inf, group.arrival)
    return group.order
