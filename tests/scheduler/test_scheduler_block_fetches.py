"""Fetches one by one, without steps: who is asked for what, under which number, who holds it. Blocks hold 4 tokens."""

from typing import Any

import pytest

from scheduler_svc.core.fetch_costs import FetchMode
from scheduler_svc.core.fetching import MAX_FETCH_ID, BlockFetches, Fetch
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting_queue import WaitingQueue
from tests.scheduler.worker_states import (
    cache_prompt,
    execute,
    launch,
    launch_rows,
    make_group,
    make_new_group,
    make_worker,
    new_step,
    start,
)

PROMPT = [*range(1, 13)]  # 3 blocks, of which a group with one token more finds all


class Site:
    """Workers that store blocks alike, with options of each, and a queue; `a` has the prompt cached."""

    def __init__(self, mode: FetchMode = "always", **workers: dict[str, Any]) -> None:
        self.queue = WaitingQueue()
        self.workers = {
            worker_id: make_worker(worker_id, **{"block_format": "f", "max_fetched_blocks": 99, **options})
            for worker_id, options in workers.items()
        }
        self.fetches = BlockFetches(mode, self.queue, self.workers)
        self._num_groups = 0
        cache_prompt(self.workers["a"], PROMPT)

    def push(self, prompt: list[int] | None = None) -> SequenceGroup:
        self._num_groups += 1
        group = make_new_group([*(prompt or PROMPT), 99], arrival=self._num_groups)
        self.queue.push(group)
        return group

    def begin(self, group: SequenceGroup, destination: str = "b") -> Fetch | None:
        """Fetch for a group; None: it may be started."""
        if not self.fetches.begin(self.workers[destination], group):
            return None
        (fetch,) = self.fetches.take_started()
        return fetch

    def fetch(self, group: SequenceGroup, destination: str = "b") -> Fetch:
        fetch = self.begin(group, destination)
        assert fetch is not None
        return fetch

    def end(self, fetch: Fetch) -> int:
        num_to_place = self.fetches.end(fetch, len(fetch.blocks))
        self.fetches.check()
        return num_to_place


@pytest.mark.parametrize(
    ("destination", "is_draining", "is_fetched"),
    [("b", False, True), ("b", True, False), ("gone", False, False), (None, False, False)],
)
def test_a_group_that_was_stopped_for_a_worker_is_fetched_there_if_that_still_serves(
    destination: str | None, is_draining: bool, is_fetched: bool
) -> None:
    site = Site(a={}, c={}, b={})
    site.workers["b"].is_draining = is_draining
    group = site.push()
    group.destination = destination
    site.fetches.begin_move(group)
    started = [(fetch.destination.worker_id, fetch.source.worker_id) for fetch in site.fetches.take_started()]
    assert started == [("b", "a")] * is_fetched and group.destination is None
    assert group.state is (GroupState.FETCHING if is_fetched else GroupState.WAITING)
    assert site.fetches.take_started() == []


@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_the_first_blocks_are_fetched_that_the_destination_has_room_for(room: int) -> None:
    site = Site(a={}, b={"max_fetched_blocks": room})
    first, second = site.push(), site.push()
    fetch = site.fetch(first)
    assert fetch.hashes == first.sequences[0].block_hashes[: min(room, 3)]
    rest = site.begin(second)
    assert (rest is None) == (room <= 3) and (rest is None or len(rest.blocks) == 1)
    site.fetches.check()


def test_the_memory_of_what_has_come_is_free_again_when_the_step_is_done_that_places_it() -> None:
    site = Site(a={}, b={"max_fetched_blocks": 3})
    worker = site.workers["b"]
    cache_prompt(site.workers["a"], [*range(21, 29)])
    assert site.end(site.fetch(site.push())) == 3
    second = site.push([*range(21, 29)])
    assert site.begin(second) is None, "no plan has placed it"
    step = new_step(worker)
    step.placed, worker.unsent_placed = worker.unsent_placed, {}
    launch(worker, step)
    assert site.begin(second) is None, "the step is in flight"
    worker.complete_step()
    assert len(site.fetch(second).blocks) == 2


def test_fetches_are_numbered_from_one_to_the_largest_number_and_then_anew() -> None:
    site = Site(a={}, b={})
    groups = [site.push() for _ in range(5)]
    numbers = []
    for index, group in enumerate(groups):
        if index == 2:
            site.fetches._last_id = MAX_FETCH_ID - 1
        fetch = site.fetch(group)
        assert group.fetch_id == fetch.fetch_id
        numbers.append(fetch.fetch_id)
        site.fetches.end(fetch, 0)
    assert numbers == [1, 2, MAX_FETCH_ID, 1, 2]


def test_a_group_is_fetched_for_once_until_it_starts() -> None:
    site = Site(a={}, b={}, c={})
    fetch = site.fetch(group := site.push())
    site.fetches.end(fetch, 0)
    assert group.state is GroupState.WAITING
    assert site.begin(group) is None and site.begin(group, "c") is None


@pytest.mark.parametrize(("roles", "is_fetched"), [("mixed decode", True), ("decode mixed", False)])
def test_a_worker_that_is_there_to_decode_fetches_whatever_it_costs(roles: str, is_fetched: bool) -> None:
    source, destination = roles.split()
    site = Site("never", a={"role": source}, b={"role": destination})
    assert (site.begin(site.push()) is not None) is is_fetched


@pytest.mark.parametrize(("decode_step_s", "pays"), [(None, True), (0.01, True), (0.03, False)])
def test_steps_of_rows_that_run_at_the_destination_count_once_their_time_is_known(
    decode_step_s: float | None, pays: bool
) -> None:
    """10 blocks at 50 a second are 0.2 s, 40 tokens at 100 a second 0.4 s; the group starts with the tenth step."""
    site = Site("auto", a={}, b={"max_placed_blocks": 1})
    source, destination = site.workers["a"], site.workers["b"]
    launch_rows(destination, start(destination, make_group([70], arrival=70)))
    destination.costs = PreemptionCosts(
        prefill_tokens_per_s=100.0, fetch_blocks_per_s=50.0, decode_step_s=decode_step_s
    )
    assert site.fetches.pays(destination, source, 10) is pays


def test_the_worker_that_has_most_beyond_what_is_there_is_the_source() -> None:
    site = Site(a={}, few={}, other={"block_format": "g"}, most={}, as_many={}, b={})
    for worker_id, num_blocks in (("few", 4), ("other", 6), ("most", 5), ("as_many", 5), ("b", 2)):
        cache_prompt(site.workers[worker_id], [*range(1, 4 * num_blocks + 1)])
    group = site.push([*range(1, 25)])
    fetch = site.fetch(group)
    assert fetch.source is site.workers["most"]
    assert fetch.hashes == group.sequences[0].block_hashes[2:5]
    assert fetch.blocks == [site.workers["most"].blocks.find(each) for each in fetch.hashes]


def test_a_source_need_not_have_what_is_there_already() -> None:
    site = Site(a={}, b={})
    cache_prompt(site.workers["b"], PROMPT[:4])
    group = site.push()
    site.workers["b"].find_prefix(group.sequences[0])
    first, *others = group.sequences[0].block_hashes
    site.workers["a"].blocks.forget(first)
    assert site.fetch(group).hashes == others


def test_of_samples_that_have_the_prompt_alone_one_is_hashed_and_looked_up_for_all() -> None:
    site = Site(a={}, b={})
    group = make_new_group([*PROMPT, 99], [], [], [], arrival=50)
    site.queue.push(group)
    assert site.end(site.fetch(group)) == 3
    assert [len(each.block_hashes) for each in group.sequences] == [3, 0, 0]


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_one_block_is_enough_for_a_fetch(num_blocks: int) -> None:
    fetch = (site := Site(a={}, b={})).begin(site.push([*PROMPT[: 4 * num_blocks], 50]))
    assert (0 if fetch is None else len(fetch.blocks)) == num_blocks


@pytest.mark.parametrize(
    ("is_at_source", "is_here", "num_blocks"), [(True, False, 4), (False, False, 3), (True, True, 3), (False, True, 3)]
)
def test_a_tail_is_fetched_with_the_blocks_before_it_unless_it_is_here(
    is_at_source: bool, is_here: bool, num_blocks: int
) -> None:
    site = Site(a={}, b={})
    source, destination = site.workers["a"], site.workers["b"]
    group = start(source, make_group([*PROMPT, 13, 14], arrival=60))
    launch_rows(source, group)
    execute(source)
    source.set_aside(group)
    site.queue.push(group)
    (sequence,) = group.sequences
    assert sequence.tail is not None
    if not is_at_source:
        source.blocks.forget(sequence.tail.block_hash)
    if is_here:
        (block,) = destination.blocks.allocate(1)
        destination.blocks.register(block, sequence.tail.block_hash)
    fetch = site.fetch(group)
    assert fetch.hashes == [*sequence.block_hashes[:3], sequence.tail.block_hash][:num_blocks]


def test_blocks_from_a_step_in_flight_on_are_left_out() -> None:
    site = Site(a={}, b={})
    source = site.workers["a"]
    running = start(source, make_group([*PROMPT, *range(13, 22)], arrival=50))
    launch_rows(source, running)  # from the fourth block on
    group = site.push([*PROMPT, *range(13, 21)])
    fetch = site.fetch(group)
    assert len(source.find_prefix(group.sequences[0])) == 5
    assert fetch.hashes == group.sequences[0].block_hashes[:3]


def test_source_and_destination_hold_what_is_on_its_way_and_then_what_has_come() -> None:
    site = Site(a={}, b={})
    source, destination = site.workers["a"], site.workers["b"]
    fetch = site.fetch(group := site.push())
    assert source.blocks.num_used_blocks == 3 and list(source.read_by_fetches) == [fetch.fetch_id]
    assert (destination.num_coming_fetched, destination.num_fetches) == (3, 1)
    states = [group.state]
    assert site.end(fetch) == 3
    assert [*states, group.state] == [GroupState.FETCHING, GroupState.WAITING]
    assert source.blocks.num_used_blocks == 0 and not source.read_by_fetches
    assert destination.num_coming_fetched == 0 and not destination.placed_by_fetches
    assert group.num_fetched_blocks == 3
    assert destination.find_prefix(group.sequences[0]) == list(destination.unsent_placed)
    with pytest.raises(KeyError):
        site.fetches.end(fetch, 3)


def placing(site: Site, group: SequenceGroup) -> Fetch:
    """Fetch for a group what the destination, which has a row, places block by block; one is placed."""
    destination = site.workers["b"]
    destination.max_placed_blocks = 1
    row = start(destination, make_group([70], arrival=70))
    launch_rows(destination, row)
    fetch = site.fetch(group)
    assert site.end(fetch) == 3
    assert group.state is GroupState.FETCHING and len(destination.unsent_placed) == 1
    assert destination.num_coming_fetched == 3 and len(destination.placed_by_fetches[fetch.fetch_id]) == 1
    return fetch


@pytest.mark.parametrize(
    ("num_computed", "max_placed", "has_room", "num_to_place"),
    [
        (0, None, True, 3),
        (8, None, True, 3),
        (12, None, True, 0),
        (0, None, False, 0),
        (0, 1, True, 3),
        (4, 1, True, 3),
    ],
)
def test_the_destination_is_to_place_all_of_a_fetch_or_none(
    num_computed: int, max_placed: int | None, has_room: bool, num_to_place: int
) -> None:
    """`num_computed`: tokens that it has computed meanwhile. It runs a row, so that `max_placed` counts."""
    site = Site(a={}, b={"max_placed_blocks": max_placed})
    destination = site.workers["b"]
    fetch = site.fetch(site.push())
    if num_computed:
        cache_prompt(destination, PROMPT[:num_computed])
    launch_rows(destination, start(destination, make_group([70], arrival=70)))
    taken = destination.blocks.allocate(0 if has_room else destination.blocks.num_available_blocks)
    assert site.end(fetch) == num_to_place
    assert site.fetches.is_needed(fetch) == bool(num_to_place)
    destination.blocks.free(taken)


def test_what_is_placed_of_a_fetch_is_held_until_the_group_leaves_and_no_longer() -> None:
    site = Site(a={}, b={})
    groups = site.push(), site.push()
    destination = site.workers["b"]
    fetch = placing(site, groups[0])
    site.fetches.leave(groups[1])
    groups[1].fetch_id = fetch.fetch_id  # of numbers that began anew
    site.fetches.leave(groups[1])
    assert list(destination.placed_by_fetches) == [fetch.fetch_id] and site.fetches.is_needed(fetch)
    site.fetches.leave(groups[0])
    assert not destination.placed_by_fetches and destination.num_coming_fetched == 0
    assert groups[0].state is GroupState.WAITING
    site.fetches.leave(groups[0])  # again is harmless
    site.fetches.check()


@pytest.mark.parametrize("event", ["undo", "drop"])
def test_what_no_plan_has_placed_is_forgotten(event: str) -> None:
    site = Site(a={}, b={})
    destination = site.workers["b"]
    fetch = placing(site, group := site.push())
    if event == "undo":
        site.fetches.undo_placing(destination)
    else:
        site.fetches.drop(fetch)
    assert not destination.unsent_placed and not destination.placed_by_fetches
    assert destination.find_prefix(group.sequences[0]) == [] and group.state is GroupState.WAITING
    assert not site.fetches.is_needed(fetch)
    site.fetches.drop(fetch)  # again is harmless
    site.fetches.check()


def test_what_is_placed_elsewhere_stays_when_a_worker_loses_what_had_come() -> None:
    site = Site(a={}, b={}, c={})
    here, there = site.push(), site.push()
    kept = placing(site, here)
    other = site.fetch(there, "c")
    assert site.fetches.end(other, 3) == 3
    site.fetches.undo_placing(site.workers["c"])
    assert not site.workers["c"].unsent_placed and not site.fetches.is_needed(other)
    assert site.workers["b"].unsent_placed and site.fetches.is_needed(kept) and here.state is GroupState.FETCHING


def test_a_fetch_to_a_worker_that_is_gone_is_needed_no_more() -> None:
    fetch = placing(site := Site(a={}, b={}), site.push())
    site.workers["b"] = make_worker("b")
    assert not site.fetches.is_needed(fetch)


def test_nothing_is_placed_of_a_fetch_whose_source_is_gone() -> None:
    site = Site(a={}, b={})
    fetch = site.fetch(group := site.push())
    before, site.workers["a"] = site.workers["a"], make_worker("a")
    assert site.end(fetch) == 0
    assert before.read_by_fetches and group.state is GroupState.WAITING and not site.workers["b"].unsent_placed
    assert site.workers["b"].num_coming_fetched == 0
