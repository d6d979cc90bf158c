"""Fetches: blocks pass from the prefix cache of one worker to that of the worker that is about to start a group.

Its group is FETCHING until all is there. What has come is put into the destination's cache, where the group finds it as
any prefix: so a fetch that fails costs computation, and nothing else depends on it. Running groups move in this way,
too: preempted on one worker, fetched and started on another. Names blocks by their hashes alone, and only those whose
steps are done. Who carries them is `workers/block_carrier.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

from scheduler_svc.core.fetch_costs import FetchMode, prefers_fetch
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.placing import drop_unsent, num_placeable_blocks, num_placing_steps, place_blocks
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.sharing import distinct_members
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState

MAX_FETCH_ID = (1 << 31) - 1  # of int32 on the wire


@dataclass(eq=False, slots=True)
class Fetch:
    """Blocks on their way, and the group that waits for them. Holds one reference to each block of the source."""

    fetch_id: int
    group: SequenceGroup
    source: WorkerState
    destination: WorkerState
    hashes: list[bytes]
    blocks: list[int]  # beside hashes: of the source
    num_left: int = 0  # that the group lacks besides, since the destination had no memory for more
    num_come: int = 0  # the first of them, once the fetch has ended
    num_placed: int = 0  # the first of these, by plans of the destination


class BlockFetches:
    """Fetches under way, between workers that store blocks in the same format."""

    def __init__(self, mode: FetchMode, queue: WaitingQueue, workers: dict[str, WorkerState]) -> None:
        self._mode = mode
        self._queue = queue
        self._workers = workers
        self._under_way: dict[int, Fetch] = {}
        self._placing: dict[int, Fetch] = {}  # ended; not all that has come is in plans yet
        self._continuing: dict[SequenceGroup, Fetch] = {}  # all is in plans; the next is to bring what is left
        self._started: list[Fetch] = []  # for the caller to carry
        self._last_id = 0

    def begin_move(self, group: SequenceGroup) -> None:
        """Begin the fetch of a WAITING group that was stopped to go on at its destination, if that is still there."""
        destination = self._workers.get(group.destination or "")
        group.destination = None
        if destination is not None and not destination.is_draining:
            self.begin(destination, group)

    def begin(self, destination: WorkerState, group: SequenceGroup) -> bool:
        """Begin a fetch for a WAITING group that the destination could start now. False: it may be started.

        A group is fetched for once before it starts, so that it cannot go round; or again for what is left of a fetch.
        """
        return not group.fetch_id and self._begin(destination, group)

    def _begin(self, destination: WorkerState, group: SequenceGroup, *, most: int | None = None) -> bool:
        """Begin a fetch, unless the group lacks more than `most` blocks."""
        num_free = destination.num_fetchable_blocks
        if num_free <= 0:
            return False
        found = _best_source(destination, group, self._workers.values())
        if found is None or (most is not None and len(found[1]) > most):
            return False
        source, blocks = found[0], dict(islice(found[1].items(), num_free))
        if not self.pays(destination, source, len(blocks)):
            return False
        self._start(destination, group, source, blocks, num_left=len(found[1]) - len(blocks))
        return True

    def pays(self, destination: WorkerState, source: WorkerState, num_blocks: int) -> bool:
        """True if fetching so many blocks is preferred to computing their tokens."""
        if destination.role == "decode":
            return True  # it is there so that no prompt delays its rows
        costs = destination.costs or source.costs  # a worker that has just come has measured nothing
        prefill_tokens_per_s = costs.prefill_tokens_per_s if costs is not None else None
        num_tokens = num_blocks * destination.block_size
        speed = destination.costs.fetch_blocks_per_s if destination.costs is not None else None
        step_s = costs.decode_step_s if costs is not None else None
        num_steps_before = num_placing_steps(destination, num_blocks) - 1  # the group starts with the last
        placing_s = (step_s or 0.0) * num_steps_before
        return prefers_fetch(
            self._mode, prefill_tokens_per_s, speed, destination.num_fetches, num_blocks, num_tokens, placing_s
        )

    def _start(
        self,
        destination: WorkerState,
        group: SequenceGroup,
        source: WorkerState,
        blocks: dict[bytes, int],
        *,
        num_left: int,
    ) -> None:
        self._last_id = self._last_id % MAX_FETCH_ID + 1
        fetch = Fetch(self._last_id, group, source, destination, list(blocks), list(blocks.values()), num_left)
        source.blocks.share(fetch.blocks)
        source.read_by_fetches[fetch.fetch_id] = fetch.blocks
        destination.num_coming_fetched += len(blocks)
        destination.num_fetches += 1
        self._under_way[fetch.fetch_id] = fetch
        self._started.append(fetch)
        self._queue.hold(group)
        group.fetch_id = fetch.fetch_id

    def take_started(self) -> list[Fetch]:
        """Return the fetches that have begun since the last call. Each must come to its `end`."""
        started, self._started = self._started, []
        return started

    def end(self, fetch: Fetch, num_blocks: int) -> int:
        """End a fetch of which the first `num_blocks` have come. Return how many the destination is to place.

        These are all, or none. Raises KeyError if it has ended before.
        """
        del self._under_way[fetch.fetch_id]
        source, destination = fetch.source, fetch.destination
        is_source_here = self._workers.get(source.worker_id) is source
        if is_source_here:
            del source.read_by_fetches[fetch.fetch_id]
            source.blocks.free(fetch.blocks)
        is_destination_here = self._workers.get(destination.worker_id) is destination
        # Without the source's state nothing says that its blocks were not written meanwhile.
        if not (_is_wanted(fetch) and is_source_here and is_destination_here):
            num_blocks = 0
        fetch.num_come = num_blocks
        known: list[int] = []
        if num_blocks:  # else the destination may be gone, and its block size that of no present worker
            members = distinct_members(fetch.group.live)
            known = [block for sequence in members for block in destination.find_prefix(sequence)]
        destination.blocks.share(known)  # what is there already makes no room for what has come
        destination.placed_by_fetches[fetch.fetch_id] = known
        self._placing[fetch.fetch_id] = fetch
        if not num_blocks:
            self._settle(fetch)
            return 0
        self.place(destination)
        is_placing = self._placing.get(fetch.fetch_id) is fetch
        has_room = any(placed.fetch_id == fetch.fetch_id for placed in destination.unsent_placed.values())
        return num_blocks if is_placing or has_room else 0

    def place(self, worker: WorkerState) -> None:
        """Have the worker's next plan place what has come to it, as much as it may; release groups that have all."""
        for fetch in [each for each in self._placing.values() if each.destination is worker]:
            num_placed = num_placeable_blocks(worker, fetch.num_come - fetch.num_placed, fetch.num_come)
            if _is_wanted(fetch):
                indices = range(fetch.num_placed, fetch.num_placed + num_placed)
                num_new, has_room = place_blocks(worker, fetch.fetch_id, fetch.hashes, indices)
                fetch.group.num_fetched_blocks += num_new
                fetch.num_placed += num_placed
                if has_room and fetch.num_placed < fetch.num_come:
                    return
            self._settle(fetch)
        for fetch in [each for each in self._continuing.values() if each.destination is worker]:
            self._continue(fetch)

    def _continue(self, last: Fetch) -> None:
        """Begin the next fetch of a group once there is memory; have it start without where no row waits for that."""
        worker, group = last.destination, last.group
        is_wanted = _is_wanted(last) and bool(worker.running) and not worker.is_draining
        if is_wanted and 2 * worker.num_fetchable_blocks < worker.max_fetched_blocks:
            return  # for steps in flight: else it would come in many small parts
        del self._continuing[group]
        if _is_wanted(last):
            self._queue.release(group)
            if is_wanted:
                self._begin(worker, group, most=last.num_left)

    def has_part_to_come(self, worker: WorkerState) -> bool:
        """True if a group waits for memory there, for the next part of what it lacks."""
        return any(each.destination is worker for each in self._continuing.values())

    def is_needed(self, fetch: Fetch) -> bool:
        """True while plans of the destination, in flight or to come, place blocks of a fetch that has ended."""
        worker = fetch.destination
        if self._workers.get(worker.worker_id) is not worker:
            return False
        if self._placing.get(fetch.fetch_id) is fetch:
            return True
        placed = chain(worker.unsent_placed.values(), *(step.placed.values() for step in worker.in_flight))
        return any(each.fetch_id == fetch.fetch_id for each in placed)

    def drop(self, fetch: Fetch) -> bool:
        """Place no more of a fetch, and forget what no plan has placed yet: the destination keeps it no more.

        True if its group has waited for that, and may be started now by any worker.
        """
        drop_unsent(fetch.destination, fetch.fetch_id)
        if self._placing.get(fetch.fetch_id) is not fetch:
            return False
        has_waited = _is_wanted(fetch)
        self._settle(fetch)
        return has_waited

    def leave(self, group: SequenceGroup) -> None:
        """Place no more for a group that is about to leave the queue."""
        self._continuing.pop(group, None)
        fetch = self._placing.get(group.fetch_id)
        if fetch is not None and fetch.group is group:
            self._settle(fetch)

    def undo_placing(self, worker: WorkerState) -> None:
        """Place no more on a worker whose steps were taken back: blocks before may be missing, and the rest is gone."""
        for fetch_id in {placed.fetch_id for placed in worker.unsent_placed.values()}:
            drop_unsent(worker, fetch_id)
        self.forget_destination(worker)

    def forget_destination(self, worker: WorkerState) -> None:
        """Place no more on a worker that is gone."""
        for fetch in [each for each in self._placing.values() if each.destination is worker]:
            self._settle(fetch)
        for fetch in [each for each in self._continuing.values() if each.destination is worker]:
            del self._continuing[fetch.group]
            if _is_wanted(fetch):
                self._queue.release(fetch.group)

    def _settle(self, fetch: Fetch) -> None:
        """Give up what the destination holds for a fetch: its group can start, and finds what has been placed.

        Not if all was, and more is left to fetch.
        """
        del self._placing[fetch.fetch_id]
        fetch.destination.num_coming_fetched -= len(fetch.blocks)
        fetch.destination.blocks.free(fetch.destination.placed_by_fetches.pop(fetch.fetch_id))
        if _is_wanted(fetch) and fetch.num_left and fetch.num_placed == len(fetch.blocks):
            self._continuing[fetch.group] = fetch
        elif _is_wanted(fetch):
            self._queue.release(fetch.group)

    def check(self) -> None:
        """Assert that groups wait for fetches under way, and that sources and destinations know of these."""
        for worker in self._workers.values():
            reading = {each.fetch_id for each in self._under_way.values() if each.source is worker}
            assert worker.read_by_fetches.keys() == reading
            coming = [each for each in self._all() if each.destination is worker]
            assert worker.num_coming_fetched == sum(len(each.blocks) for each in coming) <= worker.max_fetched_blocks
            assert worker.placed_by_fetches.keys() == {each.fetch_id for each in coming} & self._placing.keys()
        for group in self._queue:
            if group.state is GroupState.FETCHING:
                fetch = self._under_way.get(group.fetch_id) or self._placing.get(group.fetch_id)
                fetch = fetch or self._continuing[group]
                assert fetch.group is group, "a group waits for a fetch that is not under way"

    def _all(self) -> list[Fetch]:
        return [*self._under_way.values(), *self._placing.values()]


def _is_wanted(fetch: Fetch) -> bool:
    return fetch.group.state is GroupState.FETCHING and fetch.group.fetch_id == fetch.fetch_id


def _best_source(
    destination: WorkerState, group: SequenceGroup, workers: Iterable[WorkerState]
) -> tuple[WorkerState, dict[bytes, int]] | None:
    """Return the worker that has most of the group cached beyond what the destination has, with its blocks by hash."""
    best: tuple[WorkerState, dict[bytes, int]] | None = None
    members = [(sequence, destination.find_prefix(sequence)) for sequence in distinct_members(group.live)]
    for worker in workers:
        if worker is destination or not destination.can_fetch_from(worker):
            continue
        blocks = _blocks_beyond(destination, members, worker)
        if len(blocks) > (len(best[1]) if best is not None else 0):
            best = worker, blocks
    return best


def _blocks_beyond(
    destination: WorkerState, members: Iterable[tuple[Sequence, list[int]]], source: WorkerState
) -> dict[bytes, int]:
    """Return the source's cached and computed blocks behind those that each member has there, by hash, in order."""
    in_doubt = source.blocks_in_doubt()
    found: dict[bytes, int] = {}
    for sequence, there in members:
        blocks = source.find_prefix(sequence, there)
        named = list(zip(sequence.block_hashes[len(there) :], blocks[len(there) :], strict=False))
        tail = source.find_tail(sequence, len(blocks))
        if tail is not None and sequence.tail is not None and destination.find_tail(sequence, len(blocks)) is None:
            named.append((sequence.tail.block_hash, tail))
        for block_hash, block in named:
            if block in in_doubt:
                break
            found[block_hash] = block
    return found
