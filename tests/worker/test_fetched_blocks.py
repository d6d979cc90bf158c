"""Memory for fetched blocks: nobody's content is lost or mixed up, and every place comes back."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_svc.steps.fetched_blocks import FetchedBlocks, FetchEnd, FetchNameTakenError, KeptFetch, NoRoomError
from worker_svc.steps.step_check import BlockPairs
from worker_svc.steps.step_limits import MissingBlocksError

NUM_PLACES, BLOCK_BYTES = 6, 8


class Site:
    """Fetched blocks beside a plain reading of what must be in them."""

    def __init__(self) -> None:
        self.memory = np.zeros((NUM_PLACES, BLOCK_BYTES), dtype=np.uint8)
        self.fetched = FetchedBlocks(self.memory)
        self.kept: dict[tuple[int, int], KeptFetch] = {}
        self.ends: dict[KeptFetch, list[FetchEnd]] = {}
        self.taken: list[tuple[BlockPairs, list[bytes]]] = []  # and the content that each must have
        self.gone: dict[KeptFetch, set[int]] = {}  # indices of blocks that have been taken

    def open(self, epoch: int, fetch_id: int, num_blocks: int) -> KeptFetch:
        ends: list[FetchEnd] = []
        fetch = self.fetched.open(epoch, fetch_id, num_blocks, ends.append)
        self.ends[fetch] = ends
        self.kept[epoch, fetch_id] = fetch
        return fetch

    def left(self, fetch: KeptFetch) -> set[int]:
        """Indices of blocks that no step has taken."""
        return set(range(len(fetch.places))) - self.gone.get(fetch, set())

    def content(self, fetch: KeptFetch, index: int) -> bytes:
        return bytes([fetch.epoch, fetch.fetch_id, index, 7]) * (BLOCK_BYTES // 4)

    def write(self, fetch: KeptFetch, count: int) -> None:
        first = fetch.num_come
        blocks = b"".join(self.content(fetch, index) for index in range(first, first + count))
        self.fetched.write(fetch, first, memoryview(blocks))

    def take(self, epoch: int, placed: list[tuple[int, int, int]]) -> BlockPairs:
        pairs = self.fetched.take(epoch, placed)
        contents = [self.content(self.kept[epoch, fetch_id], index) for fetch_id, index, _ in placed]
        assert [block for _, block in pairs] == [block for _, _, block in placed]
        self.taken.append((pairs, contents))
        for fetch_id in {fetch_id for fetch_id, _, _ in placed}:
            fetch = self.kept[epoch, fetch_id]
            indices = {index for other, index, _ in placed if other == fetch_id}
            self.gone.setdefault(fetch, set()).update(indices)
            if len(fetch.places) - 1 in indices:
                self.assert_ended(self.kept.pop((epoch, fetch_id)), FetchEnd.PLACED)
        return pairs

    def assert_ended(self, fetch: KeptFetch, end: FetchEnd) -> None:
        assert self.ends[fetch] == [fetch.end] == [end]

    def check(self) -> None:
        """Every place is free, or owned by one fetch or one step, and holds what it must."""
        owned = [fetch.places[index] for fetch in self.kept.values() for index in self.left(fetch)]
        owned += {place for pairs, _ in self.taken for place, _ in pairs}
        assert len(set(owned)) == len(owned)
        assert (self.fetched.max_blocks, self.fetched.num_free) == (NUM_PLACES, NUM_PLACES - len(owned))
        for fetch in self.kept.values():
            assert not self.ends[fetch]
            for index in self.left(fetch) & set(range(fetch.num_come)):
                assert bytes(self.memory[fetch.places[index]]) == self.content(fetch, index)
        for pairs, contents in self.taken:
            for (place, _), content in zip(pairs, contents, strict=True):
                assert bytes(self.memory[place]) == content


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_any_order_of_events_keeps_every_content_and_every_place(seed: int) -> None:
    random = Random(seed)
    site = Site()
    for _ in range(40):
        match random.choice(["open", "open", "write", "write", "take", "release", "close", "epoch", "all"]):
            case "open":
                name, count = (random.randint(1, 2), random.randint(1, 3)), random.randint(1, NUM_PLACES)
                if name in site.kept:
                    with pytest.raises(FetchNameTakenError):
                        site.open(*name, 1)
                elif count > site.fetched.num_free:
                    with pytest.raises(NoRoomError):
                        site.open(*name, count)
                else:
                    site.open(*name, count)
            case "write" if site.kept:
                fetch = random.choice(list(site.kept.values()))
                if left := len(fetch.places) - fetch.num_come:
                    site.write(fetch, random.randint(1, left))
            case "take" if site.kept:
                epoch, fetch_id = random.choice(list(site.kept))
                fetch = site.kept[epoch, fetch_id]
                indices = random.choices(range(len(fetch.places)), k=random.randint(1, 3))
                placed = [(fetch_id, index, block) for block, index in enumerate(indices)]
                if max(indices) < fetch.num_come and site.left(fetch).issuperset(indices):
                    site.take(epoch, placed)
                else:
                    with pytest.raises(MissingBlocksError):
                        site.fetched.take(epoch, placed)
            case "release" if site.taken:
                site.fetched.release(site.taken.pop(random.randrange(len(site.taken)))[0])
            case "close" if site.kept:
                fetch = site.kept.pop(random.choice(list(site.kept)))
                site.fetched.close(fetch)
                site.fetched.close(fetch)
                site.assert_ended(fetch, FetchEnd.CLOSED)
            case "epoch":
                epoch = random.randint(1, 2)
                site.fetched.follow_epoch(epoch)
                for name in [name for name in site.kept if name[0] != epoch]:
                    site.assert_ended(site.kept.pop(name), FetchEnd.OUTDATED)
            case "all" if random.random() < 0.2:
                site.fetched.forget_all()
                for name in list(site.kept):
                    site.assert_ended(site.kept.pop(name), FetchEnd.OUTDATED)
        site.check()


def test_blocks_of_several_fetches_are_placed_by_each_step_or_none_is() -> None:
    site = Site()
    for fetch_id in (1, 2):
        site.write(site.open(1, fetch_id, 2), 1)
    with pytest.raises(MissingBlocksError, match="block 1 of fetch 2 has not come"):
        site.fetched.take(1, [(1, 0, 5), (2, 1, 6)])
    site.check()
    site.take(1, [(1, 0, 5), (2, 0, 6)])
    site.check()
    with pytest.raises(MissingBlocksError, match="block 0 of fetch 2"):
        site.fetched.take(1, [(2, 0, 6)])
    for fetch_id in (1, 2):
        site.write(site.kept[1, fetch_id], 1)
    site.take(1, [(1, 1, 5), (2, 1, 6)])
    site.check()
    assert not site.kept


def test_places_that_a_thread_writes_into_are_free_only_when_it_is_done() -> None:
    """The fetch is closed in the middle of a write, as by a caller that leaves."""

    class Watching(np.ndarray[Any, Any]):
        def __setitem__(self, place: Any, row: Any) -> None:
            fetched.close(fetch)
            seen.append(fetched.num_free)
            super().__setitem__(place, row)

    memory = np.zeros((NUM_PLACES, BLOCK_BYTES), dtype=np.uint8).view(Watching)
    fetched = FetchedBlocks(memory)
    seen: list[int] = []
    fetch = fetched.open(1, 1, 3, lambda end: None)
    fetched.write(fetch, 0, memoryview(bytes(2 * BLOCK_BYTES)))
    assert seen == [NUM_PLACES - 3] * 2
    assert fetched.num_free == NUM_PLACES
    fetched.write(fetch, 0, memoryview(bytes(BLOCK_BYTES)))  # what comes later goes nowhere
    assert fetched.num_free == NUM_PLACES


@pytest.mark.parametrize(("first", "num_bytes"), [(0, 8), (2, 8), (1, 7), (1, 0), (1, 24)])
def test_bytes_that_are_not_the_next_blocks_are_refused(first: int, num_bytes: int) -> None:
    site = Site()
    fetch = site.open(1, 1, 3)
    site.write(fetch, 1)
    with pytest.raises(ValueError, match="do not continue"):
        site.fetched.write(fetch, first, memoryview(bytes(num_bytes)))
    site.check()
