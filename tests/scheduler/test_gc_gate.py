"""Python's full garbage collections: none while many sequences are live, for so long; else as Python finds right."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from scheduler_svc.gc_gate import GcGate

NUM_OBJECTS = 400_000  # more than the quarter of all old objects from which on Python makes a full collection


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.enable()
    gc.freeze()  # what other tests left does not count
    gc.collect()
    yield before
    gc.unfreeze()
    gc.set_threshold(*before)


def num_made() -> int:
    return int(gc.get_stats()[2]["collections"])


def grow() -> int:
    """Count the full collections while many objects that stay are made."""
    before = num_made()
    kept: list[list[int]] = [[] for _ in range(NUM_OBJECTS)]
    assert len(kept) == NUM_OBJECTS
    return num_made() - before


def test_none_take_place_while_many_sequences_are_live() -> None:
    collections = GcGate(few=100, at_latest_s=60.0)
    collections.update(101)
    assert grow() == 0
    collections.update(100)
    assert grow() > 0


def test_none_take_place_before_the_first_decision() -> None:
    GcGate().close()
    assert grow() == 0


def test_young_garbage_is_collected_all_the_time() -> None:
    GcGate(few=0, at_latest_s=60.0).update(1)
    before = gc.get_stats()[0]["collected"] + gc.get_stats()[1]["collected"]
    for _ in range(10_000):
        circle: list[object] = []
        circle.append(circle)
    assert gc.get_stats()[0]["collected"] + gc.get_stats()[1]["collected"] > before + 5000


async def test_under_a_load_that_stays_there_is_one_now_and_then() -> None:
    collections = GcGate(few=0, at_latest_s=0.05)
    collections.update(1)
    assert grow() == 0
    await asyncio.sleep(0.06)
    collections.update(1)
    assert grow() > 0
    collections.update(1)
    assert grow() == 0, "it was not noticed"


async def test_who_stops_tending_leaves_all_as_it_was(thresholds: tuple[int, int, int]) -> None:
    num_sequences = 10**6
    tending = asyncio.create_task(GcGate().run(lambda: num_sequences))
    await asyncio.sleep(0)
    assert gc.get_threshold()[:2] == thresholds[:2] and gc.get_threshold()[2] > thresholds[2]
    tending.cancel()
    await asyncio.gather(tending, return_exceptions=True)
    assert gc.get_threshold() == thresholds
