"""Handing over: phases that a worker serves beside others, and running groups that another one is to go on with.

Blocks hold 4 tokens.
"""

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_svc.core import handing_over
from scheduler_svc.core.handing_over import phases_of
from scheduler_svc.core.phases import Phase, WorkerRole
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.sequence import Cohort, SequenceGroup
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import WorkerState
from tests.scheduler.worker_states import execute, launch_rows, make_group, make_new_group, make_worker, start

LIMITS = WorkerLimits(max_num_seqs=8, pipeline_depth=2)
PROMPT = [1, 2, 3, 4, 5, 6]


def worker_of(role: WorkerRole, **options: Any) -> WorkerState:
    return make_worker(role, **{"role": role, "block_format": "f", "max_fetched_blocks": 100, **options})


def groups_to_hand_over(
    worker: WorkerState, workers: list[WorkerState], queue: WaitingQueue | None = None
) -> list[SequenceGroup]:
    return handing_over.groups_to_hand_over(worker, workers, WaitingQueue() if queue is None else queue, LIMITS)


@pytest.mark.parametrize(
    ("role", "others", "draining", "phases"),
    [
        ("mixed", [], [], {Phase.PREFILL, Phase.DECODE}),
        ("mixed", ["prefill", "decode", "mixed"], [], {Phase.PREFILL, Phase.DECODE}),
        ("prefill", ["decode"], [], {Phase.PREFILL}),
        ("decode", ["prefill"], [], {Phase.DECODE}),
        ("prefill", ["mixed"], [], {Phase.PREFILL}),
        ("decode", ["mixed"], [], {Phase.DECODE}),
        ("prefill", [], [], {Phase.PREFILL, Phase.DECODE}),
        ("decode", [], [], {Phase.PREFILL, Phase.DECODE}),
        ("prefill", ["prefill"], [], {Phase.PREFILL, Phase.DECODE}),
        ("decode", ["decode", "decode"], [], {Phase.PREFILL, Phase.DECODE}),
        ("prefill", [], ["decode"], {Phase.PREFILL, Phase.DECODE}),
        ("decode", [], ["prefill", "mixed"], {Phase.PREFILL, Phase.DECODE}),
        ("decode", ["prefill"], ["mixed"], {Phase.DECODE}),
    ],
)
def test_a_worker_serves_its_role_and_what_no_worker_in_service_has(
    role: WorkerRole, others: list[WorkerRole], draining: list[WorkerRole], phases: set[Phase]
) -> None:
    worker = worker_of(role)
    workers = [worker_of(other) for other in others]
    leaving = [worker_of(other) for other in draining]
    for each in leaving:
        each.is_draining = True
    assert phases_of(worker, [*workers, worker, *leaving]) == phases


def prompt_done(worker: WorkerState, group: SequenceGroup) -> SequenceGroup:
    """Have the prompt computed, and the first token known."""
    launch_rows(worker, start(worker, group))
    execute(worker)
    return group


def test_a_group_is_handed_over_as_soon_as_its_first_token_is_on_its_way() -> None:
    worker, taker = worker_of("prefill"), worker_of("decode")
    group = start(worker, make_group(PROMPT))
    launch_rows(worker, group, budget=4)
    assert groups_to_hand_over(worker, [worker, taker]) == []
    launch_rows(worker, group)
    assert group.live[0].num_output_tokens == 0
    assert groups_to_hand_over(worker, [worker, taker]) == [group]


def test_beams_are_handed_over_only_when_their_first_tokens_are_chosen() -> None:
    worker, taker = worker_of("prefill"), worker_of("decode")
    group = start(worker, make_group(PROMPT, awaits_host=True))
    launch_rows(worker, group)
    assert groups_to_hand_over(worker, [worker, taker]) == []
    execute(worker)
    assert groups_to_hand_over(worker, [worker, taker]) == []
    group.live[0].token_ids.append(7)
    assert groups_to_hand_over(worker, [worker, taker]) == [group]


def test_every_group_that_is_done_here_is_handed_over_once_and_whole() -> None:
    worker, taker = worker_of("prefill"), worker_of("decode")
    first = prompt_done(worker, make_group(PROMPT, [], []))
    second = prompt_done(worker, make_group(PROMPT, arrival=1))
    coming = start(worker, make_group(PROMPT, arrival=2))
    assert groups_to_hand_over(worker, [taker, worker]) == [first, second]
    assert coming in {sequence.group for sequence in worker.running}


@pytest.mark.parametrize("role", ["mixed", "decode"])
def test_workers_of_other_roles_hand_nothing_over(role: WorkerRole) -> None:
    worker, taker = worker_of(role), worker_of("decode")
    prompt_done(worker, make_group(PROMPT))
    assert groups_to_hand_over(worker, [worker, taker]) == []


def drained(worker: WorkerState) -> WorkerState:
    worker.is_draining = True
    return worker


@pytest.mark.parametrize(
    ("make_takers", "is_taken"),
    [
        (lambda: [worker_of("decode")], True),
        (lambda: [worker_of("mixed")], True),
        (lambda: [worker_of("decode", num_blocks=2), worker_of("mixed")], True),
        (list, False),
        (lambda: [worker_of("prefill")], False),
        (lambda: [drained(worker_of("decode"))], False),
        (lambda: [drained(worker_of("mixed")), worker_of("prefill")], False),
        (lambda: [worker_of("decode", block_format="g")], False),
        (lambda: [worker_of("decode", max_fetched_blocks=0)], False),
        (lambda: [worker_of("decode", num_blocks=2)], False),
    ],
)
def test_who_takes_a_group_decodes_serves_reads_its_blocks_and_can_hold_it(
    make_takers: Callable[[], list[WorkerState]], is_taken: bool
) -> None:
    worker = worker_of("prefill")
    group = prompt_done(worker, make_group(PROMPT))
    assert groups_to_hand_over(worker, [worker, *make_takers()]) == [group] * is_taken


def test_a_suspect_is_tried_where_it_is() -> None:
    worker, taker = worker_of("prefill"), worker_of("decode")
    group = prompt_done(worker, make_group(PROMPT))
    group.cohort = Cohort({group: None})
    assert groups_to_hand_over(worker, [worker, taker]) == []


@pytest.mark.parametrize(
    ("max_tokens", "is_cached_here", "is_looked_up"), [(1, True, True), (9, False, True), (9, True, False)]
)
def test_a_group_stays_that_has_its_tokens_or_would_not_be_found_again(
    max_tokens: int, is_cached_here: bool, is_looked_up: bool
) -> None:
    worker, taker = worker_of("prefill", enable_prefix_cache=is_cached_here), worker_of("decode")
    group = make_group(PROMPT, max_tokens=max_tokens)
    group.sequences[0].use_prefix_cache = is_looked_up
    prompt_done(worker, group)
    assert groups_to_hand_over(worker, [worker, taker]) == []


def three_done(worker: WorkerState) -> list[SequenceGroup]:
    """Three groups of seven tokens, two blocks each, that have their prompts."""
    return [prompt_done(worker, make_group([n, *PROMPT[1:]], arrival=n, max_tokens=2)) for n in range(3)]


@pytest.mark.parametrize(
    ("options", "num_leaving"),
    [
        ({"num_seats": 2}, 2),
        ({"num_seats": 1}, 1),
        ({"num_blocks": 6}, 3),
        ({"num_blocks": 5}, 2),
        ({"num_blocks": 5, "num_watermark_blocks": 2}, 1),
    ],
)
def test_as_many_groups_leave_as_have_room_elsewhere(options: dict[str, Any], num_leaving: int) -> None:
    worker, taker = worker_of("prefill"), worker_of("decode", **options)
    groups = three_done(worker)
    assert groups_to_hand_over(worker, [worker, taker]) == groups[:num_leaving]


def test_the_room_of_all_takers_counts() -> None:
    worker = worker_of("prefill")
    takers = [make_worker(f"d{n}", role="decode", block_format="f", max_fetched_blocks=9, num_seats=1) for n in "12"]
    groups = three_done(worker)
    assert groups_to_hand_over(worker, [worker, *takers]) == groups[:2]


def test_a_smaller_group_does_not_overtake_one_that_waits_for_room() -> None:
    worker, taker = worker_of("prefill"), worker_of("decode", num_seats=2)
    start(taker, make_group([9]))
    wide = prompt_done(worker, make_group(PROMPT, [], []))
    prompt_done(worker, make_group([8], arrival=1))
    assert groups_to_hand_over(worker, [worker, taker]) == []
    wide.sequences[0].use_prefix_cache = False  # it stays, and nobody waits for it
    assert [group.arrival for group in groups_to_hand_over(worker, [worker, taker])] == [1]


def test_blocks_that_the_taker_has_cached_need_no_room() -> None:
    worker, taker = worker_of("prefill"), worker_of("decode", num_blocks=5)
    start(taker, make_group([9] * 4, max_tokens=1))
    common = start(taker, make_group([4, 3, 2, 1, 5, 6, 7, 8, 9], max_tokens=1, arrival=1))
    launch_rows(taker, common)
    execute(taker)
    group = prompt_done(worker, make_group([4, 3, 2, 1, 5, 6, 7, 8, 7], max_tokens=2, arrival=2))
    assert groups_to_hand_over(worker, [worker, taker]) == [group]
    other_worker = worker_of("prefill")
    prompt_done(other_worker, make_group([1] * 9, max_tokens=2, arrival=3))
    assert groups_to_hand_over(other_worker, [other_worker, taker]) == []


@pytest.mark.parametrize("lack", ["trial", "swapped"])
def test_a_taker_that_is_not_open_has_no_room(lack: str) -> None:
    worker, taker = worker_of("prefill"), worker_of("decode")
    prompt_done(worker, make_group(PROMPT))
    if lack == "trial":
        taker.trial = Cohort()
    else:
        taker.swapped.append(make_group(PROMPT, arrival=1))
    assert groups_to_hand_over(worker, [worker, taker]) == []


def test_groups_on_their_way_and_those_that_wait_for_a_taker_go_first() -> None:
    worker, taker, queue = worker_of("prefill"), worker_of("decode", num_seats=2), WaitingQueue()
    leaving, *staying = three_done(worker)
    launch_rows(worker, leaving)
    worker.set_aside(leaving)  # parked: its token is in flight
    assert groups_to_hand_over(worker, [worker, taker], queue) == staying[:1]
    coming = make_new_group(PROMPT, [1], arrival=8)
    queue.push(coming)
    assert groups_to_hand_over(worker, [worker, taker], queue) == []
    queue.hold(coming)
    assert groups_to_hand_over(worker, [worker, taker], queue) == []
    execute(worker)
    queue.discard(coming)
    assert groups_to_hand_over(worker, [worker, taker], queue) == staying[:1]
    queue.push(make_new_group(PROMPT, arrival=9))  # a prompt waits for no taker
    assert groups_to_hand_over(worker, [worker, taker], queue) == staying[:1]


def test_who_waits_for_a_worker_keeps_nobody_from_those_that_cannot_hold_it() -> None:
    """Regression: nothing was handed over while a group waited that only a full or a draining worker could hold."""
    worker, queue = worker_of("prefill"), WaitingQueue()
    small = make_worker("small", num_blocks=6, role="decode", block_format="f", max_fetched_blocks=100)
    large = worker_of("decode", num_seats=1)
    start(large, make_group([9]))
    queue.push(make_new_group([8] * 30, [1], arrival=8))
    fitting, too_large = prompt_done(worker, make_group(PROMPT, max_tokens=2)), make_group([7] * 30, arrival=1)
    prompt_done(worker, too_large)
    last = prompt_done(worker, make_group([6], arrival=2, max_tokens=2))
    assert groups_to_hand_over(worker, [worker, small, large], queue) == [fitting, last]


def test_groups_on_their_way_count_only_for_workers_that_can_hold_them() -> None:
    """A prompt that is fetched, or a group that is stopped, and that none of the takers can ever hold."""
    worker, taker, queue = worker_of("prefill"), worker_of("decode", num_blocks=10), WaitingQueue()
    group = prompt_done(worker, make_group(PROMPT, max_tokens=2))
    fetched = make_new_group([8] * 60, arrival=8)
    queue.push(fetched)
    queue.hold(fetched)
    assert groups_to_hand_over(worker, [worker, taker], queue) == [group]


def test_while_many_wait_to_go_on_none_is_handed_over() -> None:
    worker, queue = worker_of("prefill"), WaitingQueue()
    taker = worker_of("decode", num_blocks=1000, num_seats=100)
    limits = WorkerLimits(max_num_seqs=100, pipeline_depth=2)
    group = prompt_done(worker, make_group(PROMPT, max_tokens=2))
    for arrival in range(1, handing_over.MOST_WAITING):
        queue.push(make_new_group([8], [1], arrival=arrival, max_tokens=2))
    assert handing_over.groups_to_hand_over(worker, [worker, taker], queue, limits) == [group]
    queue.push(make_new_group([8], [1], arrival=100, max_tokens=2))
    assert handing_over.groups_to_hand_over(worker, [worker, taker], queue, limits) == []


def test_no_more_leaves_than_may_be_fetched_at_once_but_one_that_is_larger() -> None:
    """Regression: the others found no memory for fetches, and were computed again."""
    worker, taker = worker_of("prefill", num_blocks=100), worker_of("decode", num_blocks=100, max_fetched_blocks=5)
    groups = three_done(worker)
    assert groups_to_hand_over(worker, [worker, taker]) == groups[:2]  # of two blocks each
    taker.num_coming_fetched = 1
    assert groups_to_hand_over(worker, [worker, taker]) == groups[:2]
    taker.num_coming_fetched = 2
    assert groups_to_hand_over(worker, [worker, taker]) == groups[:1]
    taker.num_coming_fetched = 0
    source = worker_of("prefill")
    large = prompt_done(source, make_group([5] * 30, max_tokens=2))
    assert groups_to_hand_over(source, [source, taker]) == [large]


@pytest.mark.parametrize(("num_blocks", "is_taken"), [(7, True), (6, False)])
def test_samples_have_blocks_of_their_own_behind_the_full_ones_of_the_prompt(num_blocks: int, is_taken: bool) -> None:
    """One block in common, and three times a rest of three tokens with two of its own: two blocks."""
    worker, taker = worker_of("prefill"), worker_of("decode", num_blocks=20)
    occupy(taker, 20 - num_blocks)
    group = prompt_done(worker, make_group([1, 2, 3, 4, 5, 6, 7], [], [], [], max_tokens=3))
    assert sum(sequence.num_tokens for sequence in group.live) == 3 * 8
    launch_rows(worker, group)
    execute(worker)
    assert groups_to_hand_over(worker, [worker, taker]) == [group] * is_taken


def occupy(worker: WorkerState, num_blocks: int) -> None:
    start(worker, make_group([9] * 4 * num_blocks, arrival=900))
