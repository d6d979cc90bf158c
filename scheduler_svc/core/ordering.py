"""Order in which groups are served: by priority class, and within it by policy.

Pure functions. The last in order is preempted first.
"""

from math import inf
from typing import Literal

from scheduler_svc.core.sequence import SequenceGroup

OrderPolicy = Literal["fcfs", "edf"]  # first come, first served; earliest deadline first


def running_rank(policy: OrderPolicy, group: SequenceGroup) -> tuple[float, ...]:
    """Rank among the groups that run or are swapped out. Without a deadline a group comes after all that have one."""
    if policy == "fcfs":
        return (group.priority, group.arrival)
    return (group.priority, inf if group.deadline_s is None else group.deadline_s, group.arrival)


def newcomers_rank(policy: OrderPolicy, priority: int, deadline_s: float | None) -> tuple[float, ...]:
    """Rank that a group arriving now would get; lower ranks are served first."""
    if policy == "fcfs":
        return (priority, inf)
    return (priority, inf if deadline_s is None else deadline_s, inf)


def waiting_rank(policy: OrderPolicy, group: SequenceGroup) -> tuple[float, ...]:
    """Rank among waiting groups: no later arrival overtakes a preempted group by an earlier deadline."""
    if policy == "edf" and group.is_preempted:
        return (group.priority, -inf, group.arrival)
    return group.order
