"""The groups that wait for a worker, all workers' together, in the order in which they are served.

It knows the order and nothing else: not what a group needs, nor whether anybody can take it.
"""

import heapq
from collections.abc import Iterator

from scheduler_svc.core.ordering import OrderPolicy, newcomers_rank, waiting_rank
from scheduler_svc.core.sequence import Cohort, SequenceGroup


class WaitingQueue:
    """A heap. A discarded group leaves it when it reaches the top, or in a sweep.

    Groups that have been set aside wait too, out of order, until all are taken back; and those set apart, which are
    under suspicion, until they rejoin the others.
    """

    def __init__(self, policy: OrderPolicy = "fcfs") -> None:
        self._policy: OrderPolicy = policy
        self._aside: dict[SequenceGroup, None] = {}
        self._apart: dict[SequenceGroup, None] = {}  # those with a cohort
        self._heap: list[tuple[tuple[float, ...], SequenceGroup]] = []
        self._sizes: dict[SequenceGroup, tuple[int, int]] = {}  # who is really waiting: sequences, tokens
        self.num_sequences = 0  # of all that wait
        self.num_tokens = 0  # a shared prompt counts once
        self.num_served = 0  # that were taken from the queue

    def __len__(self) -> int:
        """Those in order alone."""
        return len(self._sizes) - len(self._aside) - len(self._apart)

    @property
    def num_groups(self) -> int:
        """All that wait."""
        return len(self._sizes)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """All that wait, in no particular order."""
        return iter(self._sizes)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self._sizes

    def push(self, group: SequenceGroup) -> None:
        assert group not in self._sizes, f"group {group.arrival} waits twice"
        if group.cohort is None:
            heapq.heappush(self._heap, (waiting_rank(self._policy, group), group))
        else:
            self._apart[group] = None
        self._count(group)

    def peek(self) -> SequenceGroup | None:
        while self._heap and not self._is_in_order(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> SequenceGroup:
        group = self.peek()
        assert group is not None, "pop() from an empty queue"
        heapq.heappop(self._heap)
        self._forget(group)
        self.num_served += 1
        return group

    def num_ahead(self, priority: int, deadline_s: float | None) -> int:
        """How many are served before a group that would come now. Looks at all that wait."""
        rank = newcomers_rank(self._policy, priority, deadline_s)
        return sum(waiting_rank(self._policy, group) < rank for group in self._sizes)

    def set_aside(self) -> None:
        """The head: it cannot be served as things are."""
        group = self.peek()
        assert group is not None, "set_aside() on an empty queue"
        heapq.heappop(self._heap)
        self._aside[group] = None

    def take_back(self) -> None:
        """All that were set aside, in order again."""
        for group in self._aside:
            heapq.heappush(self._heap, (waiting_rank(self._policy, group), group))
        self._aside.clear()

    def set_apart(self, group: SequenceGroup) -> None:
        """It has a cohort from now on. Harmless if it does not wait."""
        if group not in self._sizes or group in self._apart:
            return
        if group not in self._aside:
            self._heap = [entry for entry in self._heap if entry[1] is not group]
            heapq.heapify(self._heap)
        self._aside.pop(group, None)
        self._apart[group] = None

    def rejoin(self, group: SequenceGroup) -> None:
        """It has no cohort any more: in order again, if it waits."""
        if group in self._apart:
            del self._apart[group]
            heapq.heappush(self._heap, (waiting_rank(self._policy, group), group))

    def take(self, group: SequenceGroup) -> None:
        """Take out one of those set apart."""
        del self._apart[group]
        self._forget(group)

    def in_cohort(self, cohort: Cohort) -> list[SequenceGroup]:
        """Those of it that wait, in order."""
        waiting = [group for group in self._apart if group.cohort is cohort]
        return sorted(waiting, key=lambda group: waiting_rank(self._policy, group))

    def discard(self, group: SequenceGroup) -> None:
        """Take it out if it is there. A discarded group is finished: it is never pushed again."""
        if group in self._sizes:
            self._aside.pop(group, None)
            self._apart.pop(group, None)
            self._forget(group)
        if len(self._heap) > 2 * len(self._sizes) + 64:
            self._heap = [entry for entry in self._heap if self._is_in_order(entry[1])]
            heapq.heapify(self._heap)

    def withdraw(self, group: SequenceGroup) -> None:
        """Take it out; it may be pushed again."""
        self._aside.pop(group, None)
        self._apart.pop(group, None)
        self._forget(group)
        self._heap = [entry for entry in self._heap if entry[1] is not group]
        heapq.heapify(self._heap)

    def resize(self, group: SequenceGroup) -> None:
        """A member of a waiting group is finished; if it was set aside it may be served now."""
        if group in self._aside:
            del self._aside[group]
            heapq.heappush(self._heap, (waiting_rank(self._policy, group), group))
        self._forget(group)
        self._count(group)

    def _is_in_order(self, group: SequenceGroup) -> bool:
        return group in self._sizes and group not in self._aside and group not in self._apart

    def _count(self, group: SequenceGroup) -> None:
        size = (len(group.live), group.num_distinct_tokens)
        self._sizes[group] = size
        self.num_sequences += size[0]
        self.num_tokens += size[1]

    def _forget(self, group: SequenceGroup) -> None:
        num_sequences, num_tokens = self._sizes.pop(group)
        self.num_sequences -= num_sequences
        self.num_tokens -= num_tokens
