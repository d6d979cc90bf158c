"""Handing over: phases that a worker serves beside others, and running groups that another one is to go on with.

Blocks hold 4 tokens.
"""

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_svc.core.handing_over import groups_to_hand_over, phases_of
from scheduler_svc.core.phases import Phase, WorkerRole
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.sequence import Cohort, SequenceGroup
from scheduler_svc.core.worker_state import WorkerState
from tests.scheduler.worker_states import execute, launch_rows, make_group, make_worker, start

LIMITS = WorkerLimits(max_num_seqs=8, pipeline_depth=2)
PROMPT = [1, 2, 3, 4, 5, 6]


def worker_of(role: WorkerRole, **options: Any) -> WorkerState:
    return make_worker(role, **{"role": role, "block_format": "f", "max_fetched_blocks": 100, **options})


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
    assert groups_to_hand_over(worker, [worker, taker], LIMITS) == []
    launch_rows(worker, group)
    assert group.live[0].num_output_tokens == 0
    assert groups_to_hand_over(worker, [worker, taker], LIMITS) == [group]


def test_beams_are_handed_over_only_when_their_first_tokens_are_chosen() -> None:
    worker, taker = worker_of("prefill"), worker_of("decode")
    group = start(worker, make_group(PROMPT, awaits_host=True))
    launch_rows(worker, group)
    assert groups_to_hand_over(worker, [worker, taker], LIMITS) == []
    execute(worker)
    assert groups_to_hand_over(worker, [worker, taker], LIMITS) == []
    group.live[0].token_ids.append(7)
    assert groups_to_hand_over(worker, [worker, taker], LIMITS) == [group]


def test_every_group_that_is_done_here_is_handed_over_once_and_whole() -> None:
    worker, taker = worker_of("prefill"), worker_of("decode")
    first = prompt_done(worker, make_group(PROMPT, [], []))
    second = prompt_done(worker, make_group(PROMPT, arrival=1))
    coming = start(worker, make_group(PROMPT, arrival=2))
    assert groups_to_hand_over(worker, [taker, worker], LIMITS) == [first, second]
    assert coming in {sequence.group for sequence in worker.running}


@pytest.mark.parametrize("role", ["mixed", "decode"])
def test_workers_of_other_roles_hand_nothing_over(role: WorkerRole) -> None:
    worker, taker = worker_of(role), worker_of("decode")
    prompt_done(worker, make_group(PROMPT))
    assert groups_to_hand_over(worker, [worker, taker], LIMITS) == []


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
    assert groups_to_hand_over(worker, [worker, *make_takers()], LIMITS) == [group] * is_taken


def test_a_suspect_is_tried_where_it_is() -> None:
    worker, taker = worker_of("prefill"), worker_of("decode")
    group = prompt_done(worker, make_group(PROMPT))
    group.cohort = Cohort({group: None})
    assert groups_to_hand_over(worker, [worker, taker], LIMITS) == []


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
    assert groups_to_hand_over(worker, [worker, taker], LIMITS) == []
