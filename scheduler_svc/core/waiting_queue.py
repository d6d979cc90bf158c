"""The groups that wait for a worker, of all workers together, in the order in which they are served.

Knows the order and nothing else: not what a group needs, nor which worker can take it.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.ordering import OrderPolicy, newcomers_rank, waiting_rank
from scheduler_svc.core.phases import BOTH_PHASES, Phase, phase_of
from scheduler_svc.core.sequence import Cohort, SequenceGroup
from scheduler_svc.core.sorted_ranks import Rank, SortedRanks

_Entry = tuple[Rank, SequenceGroup]


class WaitingQueue:
    """A heap of the WAITING groups of each phase; beside them the DEFERRED, FETCHING and QUARANTINED ones.

    These wait out of order. A stale heap entry leaves when it reaches the top, or in a sweep. The queue moves groups
    between its four states and into them. A group that leaves keeps its state until the caller moves it.
    """

    def __init__(self, policy: OrderPolicy = "fcfs") -> None:
        self._policy: OrderPolicy = policy
        self._deferred: dict[SequenceGroup, bool] = {}  # whether that is for its deadline
        self._fetching: dict[SequenceGroup, None] = {}
        self._quarantined: dict[SequenceGroup, None] = {}  # those with a cohort
        self._heaps: dict[Phase, list[_Entry]] = {phase: [] for phase in Phase}
        self._entries: dict[SequenceGroup, _Entry] = {}  # the heaps' valid entries, one for each WAITING group
        self._phases: dict[SequenceGroup, Phase] = {}  # beside _entries
        self._num_stale_passed = 0  # entries that `first` has passed since the last sweep
        self._ranks = SortedRanks()  # of the valid entries
        self._sizes: dict[SequenceGroup, tuple[int, int]] = {}  # of all four states: sequences, tokens
        self._sizes_of: dict[str, tuple[int, int]] = {}  # by owner: groups, tokens
        self.num_sequences = 0  # of all four states
        self.num_tokens = 0  # a shared prompt counts once
        self.num_served = 0  # groups that have left for a worker by `pop`; one that was preempted counts again

    def __len__(self) -> int:
        """Number of groups in order: neither deferred, fetching nor quarantined."""
        return len(self._entries)

    @property
    def num_groups(self) -> int:
        """Number of groups in the queue, those out of order included."""
        return len(self._sizes)

    def size(self) -> tuple[int, int]:
        """Groups and tokens in the queue; a prompt that a group shares counts once."""
        return self.num_groups, self.num_tokens

    def size_of(self, owner: str) -> tuple[int, int]:
        """Groups and tokens of one owner in the queue."""
        return self._sizes_of.get(owner, (0, 0))

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Iterate over every group in the queue, in no particular order."""
        return iter(self._sizes)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self._sizes

    def in_order(self) -> Iterable[SequenceGroup]:
        """Groups that are WAITING, each once, in no particular order."""
        return self._entries

    def reorder(self, group: SequenceGroup) -> None:
        """Put a WAITING group where its present rank belongs."""
        self._ranks.remove(self._entries.pop(group)[0])
        self._add_entry(group)

    def push(self, group: SequenceGroup) -> None:
        """Add a group: in order, or to the quarantine if it has a cohort."""
        assert group not in self._sizes, f"group {group.arrival} waits twice"
        if group.cohort is None:
            group.move_to(GroupState.WAITING)
            self._add_entry(group)
        else:
            group.move_to(GroupState.QUARANTINED)
            self._quarantined[group] = None
        self._add_size(group)

    def peek(self, phases: Collection[Phase] = BOTH_PHASES) -> SequenceGroup | None:
        """Return the head: the first in order of the groups in these phases."""
        first: _Entry | None = None
        for phase in phases:
            heap = self._heaps[phase]
            while heap and not self._is_valid(heap[0], phase):
                heapq.heappop(heap)
            if heap and (first is None or heap[0] < first):
                first = heap[0]
        return None if first is None else first[1]

    def first(self, num_groups: int, phases: Collection[Phase]) -> Iterator[SequenceGroup]:
        """Iterate over the head and those behind it in these phases, in order, over so many at most."""
        if self._num_stale_passed > len(self._entries):
            self._sweep()  # which takes no longer than it took to pass them
        # A heap's node is no later than the two below it, so the next in order is among those below the ones before.
        frontier = [(heap[0], 0, phase.value) for phase in phases if (heap := self._heaps[phase])]
        heapq.heapify(frontier)
        last: _Entry | None = None  # a group that has changed its phase twice is listed twice
        while frontier and num_groups > 0:
            entry, index, value = heapq.heappop(frontier)
            phase = Phase(value)
            heap = self._heaps[phase]
            for below in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(frontier, (heap[below], below, value))
            if entry is not last and self._is_valid(entry, phase):
                last = entry
                num_groups -= 1
                yield entry[1]
            else:
                self._num_stale_passed += 1

    def phase_of(self, group: SequenceGroup) -> Phase:
        """Return the phase in which a WAITING group is served."""
        return self._phases[group]

    def change_phase(self, group: SequenceGroup) -> None:
        """Have a WAITING group served by the workers of the other phase: none of its own could hold it."""
        (other,) = BOTH_PHASES - {self._phases[group]}
        self._phases[group] = other
        heapq.heappush(self._heaps[other], self._entries[group])

    def pop(self, group: SequenceGroup) -> None:
        """Take out a WAITING group, for a worker to start."""
        self._remove_from_order(group)
        self._drop_size(group)
        self.num_served += 1

    def num_ahead(self, priority: int, deadline_s: float | None) -> int:
        """Number of groups in order that would be served before a group that arrives now."""
        return self._ranks.num_below(newcomers_rank(self._policy, priority, deadline_s))

    def defer_head(self, phases: Collection[Phase] = BOTH_PHASES, *, is_late: bool = False) -> None:
        """Skip the head until something changes; `is_late`: the costs, by which it cannot meet its deadline."""
        group = self.peek(phases)
        assert group is not None, "the head of an empty queue"
        self._remove_from_order(group)
        group.move_to(GroupState.DEFERRED)
        self._deferred[group] = is_late

    def restore_deferred(self) -> None:
        """Put every deferred group in order again."""
        for group in self._deferred:
            group.move_to(GroupState.WAITING)
            self._add_entry(group)
        self._deferred.clear()

    def restore_late(self) -> None:
        """Put those that were deferred for their deadlines in order again."""
        for group in [group for group, is_late in self._deferred.items() if is_late]:
            del self._deferred[group]
            group.move_to(GroupState.WAITING)
            self._add_entry(group)

    def hold(self, group: SequenceGroup) -> None:
        """Skip a WAITING group until `release`: blocks of it pass from one worker to another."""
        self._remove_from_order(group)
        group.move_to(GroupState.FETCHING)
        self._fetching[group] = None

    def fetching(self) -> Iterable[SequenceGroup]:
        """Groups that are held, in no particular order."""
        return self._fetching

    def release(self, group: SequenceGroup) -> None:
        """Put a group that was held in order again; no-op if it is FETCHING no more."""
        if group in self._fetching:
            del self._fetching[group]
            group.move_to(GroupState.WAITING)
            self._add_entry(group)

    def quarantine(self, group: SequenceGroup) -> None:
        """Move a suspect out of order; no-op if it is not in the queue."""
        if group in self._sizes:
            self._remove_from_order(group)
            if group.state is not GroupState.QUARANTINED:
                group.move_to(GroupState.QUARANTINED)
            self._quarantined[group] = None

    def release_from_quarantine(self, group: SequenceGroup) -> None:
        """Put a group that is cleared of suspicion in order again; no-op if it is not quarantined."""
        if group in self._quarantined:
            del self._quarantined[group]
            group.move_to(GroupState.WAITING)
            self._add_entry(group)

    def pop_quarantined(self, group: SequenceGroup) -> None:
        """Take out a quarantined group, for a worker to start in its trial."""
        del self._quarantined[group]
        self._drop_size(group)

    def quarantined_in(self, cohort: Cohort) -> list[SequenceGroup]:
        """Quarantined groups of one cohort, in order."""
        waiting = [group for group in self._quarantined if group.cohort is cohort]
        return sorted(waiting, key=lambda group: waiting_rank(self._policy, group))

    def discard(self, group: SequenceGroup) -> None:
        """Take out a group; no-op if it is not in the queue. It may be pushed again."""
        if group in self._sizes:
            self._remove_from_order(group)
            self._drop_size(group)

    def resize(self, group: SequenceGroup) -> None:
        """Count a group again, of which a member has finished. A deferred one may fit now: put it in order."""
        if group in self._deferred:
            del self._deferred[group]
            group.move_to(GroupState.WAITING)
            self._add_entry(group)
        self._drop_size(group)
        self._add_size(group)

    def check(self) -> None:
        """Assert that counts, states and containers agree."""
        self._ranks.check()
        in_order = sorted(rank for rank, _ in self._entries.values())
        assert [self._ranks.num_below(rank) for rank in in_order] == list(range(len(in_order)))
        listed = {
            **dict.fromkeys(self._entries, GroupState.WAITING),
            **dict.fromkeys(self._deferred, GroupState.DEFERRED),
            **dict.fromkeys(self._fetching, GroupState.FETCHING),
            **dict.fromkeys(self._quarantined, GroupState.QUARANTINED),
        }
        assert self._phases.keys() == self._entries.keys()
        assert listed == {group: group.state for group in self._sizes}, "a group is listed against its state"
        aside: tuple[Collection[SequenceGroup], ...] = (self._deferred, self._fetching, self._quarantined)
        assert len(self._entries) + sum(map(len, aside)) == len(self._sizes)
        assert self._sizes == {group: _size_of(group) for group in self._sizes}, "a group is counted as it was"
        assert self.num_sequences == sum(num_sequences for num_sequences, _ in self._sizes.values())
        assert sum(num_groups for num_groups, _ in self._sizes_of.values()) == len(self._sizes)
        assert sum(num_tokens for _, num_tokens in self._sizes_of.values()) == self.num_tokens

    def _add_entry(self, group: SequenceGroup) -> None:
        self._entries[group] = entry = (waiting_rank(self._policy, group), group)
        self._phases[group] = phase = phase_of(group)
        self._ranks.add(entry[0])
        heapq.heappush(self._heaps[phase], entry)

    def _remove_from_order(self, group: SequenceGroup) -> None:
        """Remove a group from whichever container has it; its size still counts."""
        self._deferred.pop(group, None)
        self._fetching.pop(group, None)
        self._quarantined.pop(group, None)
        entry = self._entries.pop(group, None)
        if entry is not None:
            del self._phases[group]
            self._ranks.remove(entry[0])
        if sum(map(len, self._heaps.values())) > 2 * len(self._entries) + 64:
            self._sweep()

    def _sweep(self) -> None:
        """Drop the stale entries."""
        self._num_stale_passed = 0
        for phase in self._heaps:
            self._heaps[phase] = [entry for group, entry in self._entries.items() if self._phases[group] is phase]
            heapq.heapify(self._heaps[phase])

    def _is_valid(self, entry: _Entry, phase: Phase) -> bool:
        return self._entries.get(entry[1]) is entry and self._phases[entry[1]] is phase

    def _add_size(self, group: SequenceGroup) -> None:
        self._sizes[group] = size = _size_of(group)
        self.num_sequences += size[0]
        self.num_tokens += size[1]
        num_groups, num_tokens = self.size_of(group.owner)
        self._sizes_of[group.owner] = num_groups + 1, num_tokens + size[1]

    def _drop_size(self, group: SequenceGroup) -> None:
        num_sequences, num_tokens = self._sizes.pop(group)
        self.num_sequences -= num_sequences
        self.num_tokens -= num_tokens
        num_groups, num_tokens_of_owner = self._sizes_of[group.owner]
        if num_groups == 1:
            del self._sizes_of[group.owner]
        else:
            self._sizes_of[group.owner] = num_groups - 1, num_tokens_of_owner - num_tokens


def _size_of(group: SequenceGroup) -> tuple[int, int]:
    """Return the sequences and the tokens that a group counts for."""
    return len(group.live), group.num_distinct_tokens
