"""Fetches: blocks pass from the prefix cache of one worker to that of the worker that is about to start a group.

Its group is FETCHING meanwhile. What has come is put into the destination's cache, where the group finds it as it finds
any prefix: so a fetch that fails costs computation, and nothing else depends on it. Running groups move in this way,
too: preempted on one worker, fetched and started on another. Names blocks by their hashes alone, and only those whose
steps are done. Who carries them is `workers/block_carrier.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from scheduler_svc.core.fetch_costs import FetchMode, prefers_fetch
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.sequence import SequenceGroup
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


class BlockFetches:
    """Fetches under way, between workers that store blocks in the same format."""

    def __init__(self, mode: FetchMode, queue: WaitingQueue, workers: dict[str, WorkerState]) -> None:
        self._mode = mode
        self._queue = queue
        self._workers = workers
        self._under_way: dict[int, Fetch] = {}
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

        A group is fetched for once at most before it starts, so that it cannot go round.
        """
        if group.fetch_id:
            return False
        num_free = destination.max_fetched_blocks - destination.num_coming_fetched
        if num_free <= 0:
            return False
        found = _best_source(destination, group, self._workers.values(), num_free)
        if found is None or not self.pays(destination, found[0], len(found[1])):
            return False
        self._start(destination, group, *found)
        return True

    def pays(self, destination: WorkerState, source: WorkerState, num_blocks: int) -> bool:
        """True if fetching so many blocks is preferred to computing their tokens."""
        if destination.role == "decode":
            return True  # it is there so that no prompt delays its rows
        costs = destination.costs or source.costs  # a worker that has just come has measured nothing
        prefill_tokens_per_s = costs.prefill_tokens_per_s if costs is not None else None
        num_tokens = num_blocks * destination.block_size
        speed = destination.costs.fetch_blocks_per_s if destination.costs is not None else None
        return prefers_fetch(self._mode, prefill_tokens_per_s, speed, destination.num_fetches, num_blocks, num_tokens)

    def _start(
        self, destination: WorkerState, group: SequenceGroup, source: WorkerState, blocks: dict[bytes, int]
    ) -> None:
        self._last_id = self._last_id % MAX_FETCH_ID + 1
        fetch = Fetch(self._last_id, group, source, destination, list(blocks), list(blocks.values()))
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
        """End a fetch of which the first `num_blocks` have come. Return how many the destination will place.

        Raises KeyError if it has ended before.
        """
        del self._under_way[fetch.fetch_id]
        source, destination, group = fetch.source, fetch.destination, fetch.group
        destination.num_coming_fetched -= len(fetch.blocks)
        is_source_here = self._workers.get(source.worker_id) is source
        if is_source_here:
            del source.read_by_fetches[fetch.fetch_id]
            source.blocks.free(fetch.blocks)
        is_wanted = group.state is GroupState.FETCHING and group.fetch_id == fetch.fetch_id
        is_destination_here = self._workers.get(destination.worker_id) is destination
        # Without the source's state nothing says that its blocks were not written meanwhile.
        num_placed = 0
        if is_wanted and is_source_here and is_destination_here:
            num_placed = destination.place_fetched(fetch.fetch_id, fetch.hashes[:num_blocks], group)
            group.num_fetched_blocks += num_placed
        if is_wanted:
            self._queue.release(group)
        return num_placed

    def drop_unsent(self, fetch: Fetch) -> None:
        """Forget what the destination keeps of a fetch no more, unless a step has placed it already."""
        worker = fetch.destination
        for block, placed in list(worker.unsent_placed.items()):
            if placed.fetch_id == fetch.fetch_id:
                del worker.unsent_placed[block]
                worker.blocks.forget(placed.block_hash)

    def check(self) -> None:
        """Assert that groups wait for fetches under way, and that sources and destinations know of these."""
        for worker in self._workers.values():
            reading = {each.fetch_id for each in self._under_way.values() if each.source is worker}
            assert worker.read_by_fetches.keys() == reading
            coming = [len(each.blocks) for each in self._under_way.values() if each.destination is worker]
            assert worker.num_coming_fetched == sum(coming) <= worker.max_fetched_blocks
        for group in self._queue:
            if group.state is GroupState.FETCHING:
                assert self._under_way[group.fetch_id].group is group, "a group waits for a fetch that is not under way"


def _best_source(
    destination: WorkerState, group: SequenceGroup, workers: Iterable[WorkerState], max_blocks: int
) -> tuple[WorkerState, dict[bytes, int]] | None:
    """Return the worker that has most of the group cached beyond what the destination has, with its blocks by hash."""
    best: tuple[WorkerState, dict[bytes, int]] | None = None
    for worker in workers:
        if worker is destination or not destination.can_fetch_from(worker):
            continue
        blocks = _blocks_beyond(destination, group, worker)
        if len(blocks) > (len(best[1]) if best is not None else 0):
            best = worker, blocks
    return None if best is None else (best[0], dict(islice(best[1].items(), max_blocks)))


def _blocks_beyond(destination: WorkerState, group: SequenceGroup, source: WorkerState) -> dict[bytes, int]:
    """Return the source's cached and computed blocks of the group that the destination lacks, by hash, in order."""
    in_doubt = source.blocks_in_doubt()
    found: dict[bytes, int] = {}
    for sequence in group.live:
        num_there = len(destination.find_prefix(sequence))
        blocks = source.find_prefix(sequence)
        named = list(zip(sequence.block_hashes, blocks, strict=False))
        tail = source.find_tail(sequence, len(blocks))
        if tail is not None and sequence.tail is not None and destination.find_tail(sequence, len(blocks)) is None:
            named.append((sequence.tail.block_hash, tail))
        for block_hash, block in named[num_there:]:
            if block in in_doubt:
                break
            found[block_hash] = block
    return found
