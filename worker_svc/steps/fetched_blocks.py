"""Blocks that have come from other workers, in main memory until a step places them in the pool.

Memory is `places`, each of one block. The event loop opens and closes fetches, a thread writes what comes, and the
execution thread takes it; a place has one owner at a time. Knows neither where blocks come from nor what is in them.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from worker_svc.steps.step_check import BlockPairs, PlacedBlocks
from worker_svc.steps.step_limits import MissingBlocksError

FetchMemory = npt.NDArray[np.uint8]  # [max_fetched_blocks, bytes_per_block]


class FetchEnd(Enum):
    """Reason why a fetch was forgotten."""

    CLOSED = "its call has ended"
    PLACED = "steps have placed it"
    OUTDATED = "the worker follows another epoch, or ends"


class FetchNameTakenError(ValueError):
    """A fetch of this name is kept already."""


class NoRoomError(ValueError):
    """The fetch is larger than the memory that is free."""


@dataclass(eq=False, slots=True)
class KeptFetch:
    """Fetch that is kept. Who holds it only reads it."""

    epoch: int
    fetch_id: int
    places: list[int]  # in the order of the request
    on_end: Callable[[FetchEnd], None]
    num_come: int = 0  # these places have content
    end: FetchEnd | None = None  # None: kept
    is_written: bool = False  # a thread writes into places from num_come on
    taken: set[int] = field(default_factory=set)  # places that steps have taken: no longer its own


class FetchedBlocks:
    """Fetches of a worker. Every method may be called from any thread."""

    def __init__(self, memory: FetchMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._fetches: dict[tuple[int, int], KeptFetch] = {}
        # Places that nobody owns. The last one freed is the next one used: its memory has been taken already.
        self._free = list(range(len(memory)))[::-1]

    @property
    def max_blocks(self) -> int:
        """Number of blocks that all fetches together may have."""
        return len(self._memory)

    @property
    def num_free(self) -> int:
        """Number of blocks that another fetch may have now."""
        return len(self._free)

    def open(self, epoch: int, fetch_id: int, num_blocks: int, on_end: Callable[[FetchEnd], None]) -> KeptFetch:
        """Reserve memory for a fetch. `on_end` is called once, on any thread, when it is forgotten.

        Raises FetchNameTakenError or NoRoomError.
        """
        with self._lock:
            if (epoch, fetch_id) in self._fetches:
                raise FetchNameTakenError
            if num_blocks > len(self._free):
                raise NoRoomError
            fetch = KeptFetch(epoch, fetch_id, [self._free.pop() for _ in range(num_blocks)], on_end)
            self._fetches[epoch, fetch_id] = fetch
            return fetch

    def write(self, fetch: KeptFetch, first: int, blocks: memoryview) -> None:
        """Keep the next blocks of a fetch, unless it is forgotten. One thread at a time writes into a fetch.

        Raises ValueError if they are not the next ones, or not whole blocks.
        """
        block_bytes = self._memory.shape[1]
        count, rest = divmod(len(blocks), block_bytes)
        if rest or first != fetch.num_come or not 0 < count <= len(fetch.places) - first:
            raise ValueError(f"{len(blocks):,} bytes of blocks from {first} on do not continue {fetch.num_come}")
        with self._lock:
            if fetch.end is not None:
                return
            fetch.is_written = True
        rows = np.frombuffer(blocks, dtype=np.uint8).reshape(count, block_bytes)
        for place, row in zip(fetch.places[first:], rows, strict=False):
            self._memory[place] = row
        with self._lock:
            fetch.is_written = False
            if fetch.end is None:
                fetch.num_come += count
            else:
                self._free += fetch.places[fetch.num_come :]

    def take(self, epoch: int, placed: PlacedBlocks) -> BlockPairs:
        """The (place, device block) of each block that a step places.

        A fetch is forgotten with its last block. The places are the caller's until it calls `release`. Raises
        MissingBlocksError, without any change, if a block has not come, or was taken before.
        """
        if not placed:
            return []
        with self._lock:
            pairs = [(self._place(epoch, fetch_id, index), block) for fetch_id, index, block in placed]
            for fetch_id, index, _ in placed:
                fetch = self._fetches[epoch, fetch_id]
                fetch.taken.add(fetch.places[index])
            for fetch_id in {fetch_id for fetch_id, _, _ in placed}:
                fetch = self._fetches[epoch, fetch_id]
                if fetch.places[-1] in fetch.taken:
                    self._forget(fetch, FetchEnd.PLACED)
            return pairs

    def release(self, pairs: BlockPairs) -> None:
        """Take places back that `take` has given."""
        if pairs:
            with self._lock:
                self._free += {place for place, _ in pairs}

    def close(self, fetch: KeptFetch) -> None:
        """Forget a fetch, if it is kept."""
        with self._lock:
            if fetch.end is None:
                self._forget(fetch, FetchEnd.CLOSED)

    def follow_epoch(self, epoch: int) -> None:
        """Forget all fetches of other epochs."""
        self._forget_where(lambda fetch: fetch.epoch != epoch)

    def forget_all(self) -> None:
        """Forget all fetches."""
        self._forget_where(lambda _: True)

    def _forget_where(self, is_outdated: Callable[[KeptFetch], bool]) -> None:
        with self._lock:
            for fetch in filter(is_outdated, list(self._fetches.values())):
                self._forget(fetch, FetchEnd.OUTDATED)

    def _place(self, epoch: int, fetch_id: int, index: int) -> int:
        fetch = self._fetches.get((epoch, fetch_id))
        if fetch is None or index >= fetch.num_come or fetch.places[index] in fetch.taken:
            raise MissingBlocksError(f"block {index} of fetch {fetch_id} has not come, or is kept no longer")
        return fetch.places[index]

    def _forget(self, fetch: KeptFetch, end: FetchEnd) -> None:
        """Free its places, but those taken, and those that a thread writes into, which frees them itself."""
        del self._fetches[fetch.epoch, fetch.fetch_id]
        fetch.end = end
        unused = fetch.places[: fetch.num_come] if fetch.is_written else fetch.places
        self._free += [place for place in unused if place not in fetch.taken]
        fetch.on_end(end)
