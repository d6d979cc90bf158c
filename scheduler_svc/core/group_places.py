"""Places of groups: the queue, the paused groups and the workers, and how a group passes between them.

Keeps the containers in step with `SequenceGroup.state`. Does not decide which group starts or is preempted.
"""

from collections.abc import Iterator

from scheduler_svc.core import placement
from scheduler_svc.core.draining import leaving_groups
from scheduler_svc.core.fetch_costs import FetchMode
from scheduler_svc.core.fetching import BlockFetches
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.ordering import OrderPolicy
from scheduler_svc.core.pausing import unbind_paused
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.swapping import drop_host_copy, insert_swapped
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState


class GroupPlaces:
    """The one queue, the paused groups, and the workers by id."""

    def __init__(self, policy: OrderPolicy, limits: WorkerLimits, block_fetch: FetchMode = "auto") -> None:
        self._limits = limits
        self.waiting = WaitingQueue(policy)
        self.paused: dict[SequenceGroup, None] = {}
        self.workers: dict[str, WorkerState] = {}
        self.fetches = BlockFetches(block_fetch, self.waiting, self.workers)

    def worker_of(self, group: SequenceGroup) -> WorkerState:
        assert group.worker_id is not None
        return self.workers[group.worker_id]

    def take_out(self, group: SequenceGroup) -> None:
        """Take a group out of the containers that its state names. The caller moves it on."""
        self.fetches.leave(group)
        self.waiting.discard(group)
        self.paused.pop(group, None)
        worker = self.workers.get(group.worker_id) if group.worker_id is not None else None
        if worker is not None:
            worker.take_out(group)

    def queue_again(self, group: SequenceGroup, status: SequenceStatus = SequenceStatus.PREEMPTED) -> None:
        """Unbind a group from its worker, and put it into the queue at the place of its arrival."""
        self.take_out(group)
        group.worker_id = None
        for sequence in group.live:
            sequence.status = status
            sequence.worker_id = None
        self.waiting.push(group)

    def place_preempted(self, group: SequenceGroup) -> None:
        """Put a preempted group into the queue, or among the swapped of its worker. No-op while it runs.

        No-op, too, while tokens of it are in flight.
        """
        if group.state is GroupState.RUNNING or group.num_pending_tokens:
            return
        worker = self.worker_of(group)
        others = self.workers.values() if worker.is_draining else ()
        if group.swap_step is not None and placement.has_other_place(worker, group, others, self._limits):
            drop_host_copy(worker, group)
        if group.swap_step is None:
            self.queue_again(group)
            if group.destination is not None and group.state is GroupState.WAITING:
                self.fetches.begin_move(group)
        elif group.state is not GroupState.SWAPPED:
            self.take_out(group)
            group.move_to(GroupState.SWAPPED)
            insert_swapped(worker, group)

    def place_parked(self, worker: WorkerState) -> None:
        """Place the parked and unbind the paused groups whose last token in flight is known."""
        for group in list(worker.parked):
            self.place_preempted(group)
        for group in list(worker.paused):
            unbind_paused(worker, group)

    def end_group(self, group: SequenceGroup) -> None:
        """End a group of which no member is live any more."""
        self.take_out(group)
        group.worker_id = None
        group.move_to(GroupState.ENDED)

    def move_from_draining(self) -> None:
        """Preempt the groups on draining workers that another worker could hold."""
        for group in leaving_groups(self.workers.values()):
            worker = self.worker_of(group)
            if not placement.has_other_place(worker, group, self.workers.values(), self._limits):
                continue
            if group.state is GroupState.RUNNING:
                worker.preempt(group)
            self.place_preempted(group)

    def listed_states(self) -> Iterator[tuple[SequenceGroup, GroupState]]:
        """Each listed group, with the state that its container stands for; the queue checks its own four states."""
        for group in self.waiting:
            yield group, group.state
        for group in self.paused:
            yield group, GroupState.PAUSED
        for worker in self.workers.values():
            for group in dict.fromkeys(sequence.group for sequence in worker.running):
                yield group, GroupState.RUNNING
            for group in worker.parked:
                yield group, GroupState.PARKED
            for group in worker.swapped:
                yield group, GroupState.SWAPPED

    def check(self) -> None:
        """Assert that every group is listed once, as its state says."""
        self.waiting.check()
        listed = list(self.listed_states())
        assert len({group for group, _ in listed}) == len(listed), "a group is listed twice"
        for group, state in listed:
            assert group.state is state, f"group {group.arrival} is {group.state.name}, and listed as {state.name}"
        for worker in self.workers.values():
            assert worker.paused.keys() <= self.paused.keys()
