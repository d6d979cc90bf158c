"""The groups that wait for a worker, all workers' together, in the order in which they are served.

It knows the order and nothing else: not what a group needs, nor whether anybody can take it.
"""

import heapq
from collections.abc import Iterable, Iterator

from scheduler_svc.core.ordering import OrderPolicy, newcomers_rank, waiting_rank
from scheduler_svc.core.sequence import Cohort, SequenceGroup
from scheduler_svc.core.sorted_ranks import Rank, SortedRanks

_Entry = tuple[Rank, SequenceGroup]


class WaitingQueue:
    """A heap. An entry that counts no more leaves it when it reaches the top, or in a sweep.

    Groups that have been set aside wait too, out of order, until all are taken back; and those set apart, which are
    under suspicion, until they release_from_quarantine the others.
    """

    def __init__(self, policy: OrderPolicy = "fcfs") -> None:
        self._policy: OrderPolicy = policy
        self._deferred: dict[SequenceGroup, None] = {}
        self._quarantined: dict[SequenceGroup, None] = {}  # those with a cohort
        self._heap: list[_Entry] = []
        self._entries: dict[SequenceGroup, _Entry] = {}  # who is in order: of the heap's entries those that count
        self._ranks = SortedRanks()  # those of the entries that count
        self._sizes: dict[SequenceGroup, tuple[int, int]] = {}  # who is really waiting: sequences, tokens
        self._sizes_of: dict[str, tuple[int, int]] = {}  # by owner: groups, tokens
        self.num_sequences = 0  # of all that wait
        self.num_tokens = 0  # a shared prompt counts once
        self.num_served = 0  # that were taken from the queue

    def __len__(self) -> int:
        """Those in order alone."""
        return len(self._entries)

    @property
    def num_groups(self) -> int:
        """All that wait."""
        return len(self._sizes)

    def size_of(self, owner: str) -> tuple[int, int]:
        """Groups and tokens that wait for one owner."""
        return self._sizes_of.get(owner, (0, 0))

    def __iter__(self) -> Iterator[SequenceGroup]:
        """All that wait, in no particular order."""
        return iter(self._sizes)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self._sizes

    def is_in_order(self, group: SequenceGroup) -> bool:
        """Whether it is served when its turn comes: neither set aside nor set apart."""
        return group in self._entries

    def in_order(self) -> Iterable[SequenceGroup]:
        """Those that count by their order alone, each once, in no particular order."""
        return self._entries

    def reorder(self, group: SequenceGroup) -> None:
        """One of those in order has another rank now."""
        self._ranks.remove(self._entries.pop(group)[0])
        self._put_in_order(group)

    def push(self, group: SequenceGroup) -> None:
        assert group not in self._sizes, f"group {group.arrival} waits twice"
        if group.cohort is None:
            self._put_in_order(group)
        else:
            self._quarantined[group] = None
        self._count(group)

    def peek(self) -> SequenceGroup | None:
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> SequenceGroup:
        group = self._take_head()
        self._forget(group)
        self.num_served += 1
        return group

    def num_ahead(self, priority: int, deadline_s: float | None) -> int:
        """How many in order are served before a group that would come now."""
        return self._ranks.num_below(newcomers_rank(self._policy, priority, deadline_s))

    def defer_head(self) -> None:
        """The head: it cannot be served as things are."""
        self._deferred[self._take_head()] = None

    def restore_deferred(self) -> None:
        """All that were set aside, in order again."""
        for group in self._deferred:
            self._put_in_order(group)
        self._deferred.clear()

    def quarantine(self, group: SequenceGroup) -> None:
        """It has a cohort from now on. Harmless if it does not wait."""
        if group in self._sizes:
            self._remove_from_order(group)
            self._quarantined[group] = None

    def release_from_quarantine(self, group: SequenceGroup) -> None:
        """It has no cohort any more: in order again, if it waits."""
        if group in self._quarantined:
            del self._quarantined[group]
            self._put_in_order(group)

    def pop_quarantined(self, group: SequenceGroup) -> None:
        """Take out one of those set apart."""
        del self._quarantined[group]
        self._forget(group)

    def quarantined_in(self, cohort: Cohort) -> list[SequenceGroup]:
        """Those of it that wait, in order."""
        waiting = [group for group in self._quarantined if group.cohort is cohort]
        return sorted(waiting, key=lambda group: waiting_rank(self._policy, group))

    def discard(self, group: SequenceGroup) -> None:
        """Take it out if it is there; it may be pushed again."""
        if group in self._sizes:
            self._remove_from_order(group)
            self._forget(group)

    def resize(self, group: SequenceGroup) -> None:
        """A member of a waiting group is finished; if it was set aside it may be served now."""
        if group in self._deferred:
            del self._deferred[group]
            self._put_in_order(group)
        self._forget(group)
        self._count(group)

    def check(self) -> None:
        """Assert that what is counted is what is there."""
        self._ranks.check()
        in_order = sorted(rank for rank, _ in self._entries.values())
        assert [self._ranks.num_below(rank) for rank in in_order] == list(range(len(in_order)))
        assert len(self._entries) + len(self._deferred) + len(self._quarantined) == len(self._sizes)
        assert sum(num_groups for num_groups, _ in self._sizes_of.values()) == len(self._sizes)
        assert sum(num_tokens for _, num_tokens in self._sizes_of.values()) == self.num_tokens

    def _put_in_order(self, group: SequenceGroup) -> None:
        self._entries[group] = entry = (waiting_rank(self._policy, group), group)
        self._ranks.add(entry[0])
        heapq.heappush(self._heap, entry)

    def _take_head(self) -> SequenceGroup:
        group = self.peek()
        assert group is not None, "the head of an empty queue"
        rank, _ = heapq.heappop(self._heap)
        del self._entries[group]
        self._ranks.remove(rank)
        return group

    def _remove_from_order(self, group: SequenceGroup) -> None:
        """Of wherever it waits; it still counts as waiting."""
        self._deferred.pop(group, None)
        self._quarantined.pop(group, None)
        entry = self._entries.pop(group, None)
        if entry is not None:
            self._ranks.remove(entry[0])
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def _counts(self, entry: _Entry) -> bool:
        return self._entries.get(entry[1]) is entry

    def _count(self, group: SequenceGroup) -> None:
        size = (len(group.live), group.num_distinct_tokens)
        self._sizes[group] = size
        self.num_sequences += size[0]
        self.num_tokens += size[1]
        num_groups, num_tokens = self.size_of(group.owner)
        self._sizes_of[group.owner] = num_groups + 1, num_tokens + size[1]

    def _forget(self, group: SequenceGroup) -> None:
        num_sequences, num_tokens = self._sizes.pop(group)
        self.num_sequences -= num_sequences
        self.num_tokens -= num_tokens
        num_groups, num_tokens_of_owner = self._sizes_of[group.owner]
        if num_groups == 1:
            del self._sizes_of[group.owner]
        else:
            self._sizes_of[group.owner] = num_groups - 1, num_tokens_of_owner - num_tokens
