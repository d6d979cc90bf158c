"""Limits of what a worker may take at all, at their edges. Blocks hold 4 tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.placement import (
    MAX_TIMES_LEFT,
    MAX_TIMES_WAITED,
    PREFIX_WEIGHT,
    WorkerLimits,
    claim_start,
    goes_before_swapped,
)
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Cohort, SequenceGroup
from scheduler_svc.core.waiting_reasons import WaitingReason
from scheduler_svc.core.worker_state import WorkerState
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.worker_states import cache_prompt, launch, make_group, make_worker, new_step, start

MOST_SEQUENCES = 4  # that run at once on a worker


def make_cluster() -> Cluster:
    return Cluster(SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=MOST_SEQUENCES, watermark=0.0))


@pytest.mark.parametrize(("max_tokens", "fits"), [(4, True), (5, False)])
def test_no_sequence_starts_where_it_could_become_longer_than_the_worker_can_hold(max_tokens: int, fits: bool) -> None:
    cluster = make_cluster()
    cluster.add_worker(num_blocks=40, max_model_len=12)
    group = cluster.add_group([1] * 8, 2, max_tokens)
    assert (cluster.start() is not None) is fits
    if fits:
        cluster.run_until_idle()
        return
    assert cluster.scheduler.waiting_reason(group) is WaitingReason.NO_LONGER_WORKER
    cluster.add_worker("longer", num_blocks=40, max_model_len=13)
    cluster.run_until_idle()
    assert cluster.workers["longer"].num_computed_tokens > 0 and cluster.workers["w"].num_computed_tokens == 0


@pytest.mark.parametrize(("num_seats", "num_sequences"), [(3, 3), (64, MOST_SEQUENCES)])
def test_no_group_starts_whose_sequences_cannot_all_run_at_once(num_seats: int, num_sequences: int) -> None:
    cluster = make_cluster()
    cluster.add_worker(num_blocks=40, num_seats=num_seats)
    too_wide = cluster.add_group([1, 2, 3], num_sequences + 1, 4)
    assert cluster.start() is None
    assert cluster.scheduler.waiting_reason(too_wide) is WaitingReason.NO_WIDER_WORKER
    cluster.scheduler.finish_group(too_wide)
    cluster.add_group([1, 2, 3], num_sequences, 4)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_no_more_sequences_run_at_once_than_may_though_there_are_seats() -> None:
    cluster = make_cluster()
    cluster.add_worker(num_blocks=40)
    for number in range(3):
        cluster.add_group([number + 1, 2], MOST_SEQUENCES // 2, 4)
    cluster.start()
    cluster.start()
    assert cluster.stats().num_running == MOST_SEQUENCES
    cluster.run_until_idle()


LIMITS = WorkerLimits(max_num_seqs=MOST_SEQUENCES, pipeline_depth=2)
PROMPT = [1] * 10  # two full blocks and a third


def make_pair(num_used: int = 0, num_used_by_other: int = 0, num_other_blocks: int = 100) -> list[WorkerState]:
    """Make a worker that is asked, and another, with so many blocks in use."""
    workers = [make_worker("asked", num_blocks=100), make_worker("other", num_blocks=num_other_blocks)]
    for worker, num_blocks in zip(workers, (num_used, num_used_by_other), strict=True):
        worker.blocks.allocate(num_blocks)
    return workers


def is_left(workers: list[WorkerState], group: SequenceGroup | None = None, *, is_busy: bool = False) -> bool:
    """Ask the first worker. Return whether it leaves the group to the other, and not for lack of room."""
    group = make_group(PROMPT) if group is None else group
    num_times_left = group.num_times_left
    is_left = claim_start(group, workers[0], workers, LIMITS, is_busy=is_busy) is None
    assert group.num_times_left == num_times_left + is_left
    return is_left


def fill_pipeline(worker: WorkerState, num_steps: int = LIMITS.pipeline_depth) -> None:
    for _ in range(num_steps):
        launch(worker, new_step(worker))


@pytest.mark.parametrize(("num_used", "is_better"), [(0, False), (1, True)])
def test_a_worker_with_more_available_blocks_is_better(num_used: int, is_better: bool) -> None:
    assert is_left(make_pair(num_used)) is is_better
    assert is_left(make_pair(num_used + 3, 5, num_other_blocks=102)) is is_better, "however many are in use"


@pytest.mark.parametrize("num_more", [1, 2])
@pytest.mark.parametrize("num_used", [0, 3])
def test_a_worker_with_more_of_the_prefix_is_better_unless_it_is_much_busier(num_more: int, num_used: int) -> None:
    for num_used_more, is_better in ((PREFIX_WEIGHT * num_more - 1, True), (PREFIX_WEIGHT * num_more, False)):
        workers = make_pair(num_used, num_used + num_used_more)
        cache_prompt(workers[1], PROMPT[: 4 * num_more])
        assert is_left(workers) is is_better


@pytest.mark.parametrize(("num_used", "is_better"), [(PREFIX_WEIGHT, False), (PREFIX_WEIGHT + 1, True)])
def test_a_worker_with_less_of_the_prefix_is_better_if_the_other_is_much_busier(num_used: int, is_better: bool) -> None:
    workers = make_pair(20 + num_used, 20)
    cache_prompt(workers[0], PROMPT[:4])
    assert is_left(workers) is is_better
    fill_pipeline(workers[1])
    assert not is_left(workers, is_busy=True)


def test_pinned_blocks_do_not_make_a_worker_busy() -> None:
    workers = make_pair(0, PREFIX_WEIGHT)
    cache_prompt(workers[1], PROMPT[:4])
    assert not is_left(workers)
    workers[1].num_pinned_blocks = 1
    assert is_left(workers)
    workers[0].num_pinned_blocks = 1  # as if -1 were in use
    assert not is_left(workers)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_worker_with_a_full_pipeline_is_better_for_its_prefix_if_this_one_has_rows(is_busy: bool) -> None:
    workers = make_pair()
    cache_prompt(workers[1], PROMPT[:4])
    fill_pipeline(workers[1])
    assert is_left(workers, is_busy=is_busy) is is_busy


@pytest.mark.parametrize(("num_used", "is_better"), [(9, False), (10, True)])
def test_a_worker_with_a_full_pipeline_is_better_if_it_would_be_half_as_busy_with_the_group(
    num_used: int, is_better: bool
) -> None:
    workers = make_pair(num_used, 2)  # 3 more for the prompt
    fill_pipeline(workers[1], num_steps=1)
    assert is_left(workers)
    fill_pipeline(workers[1], num_steps=1)
    assert is_left(workers, is_busy=True) is is_better
    assert not is_left(workers)


@pytest.mark.parametrize(("num_tokens", "is_better"), [(63, True), (64, False)])
def test_a_worker_whose_next_step_has_a_token_to_spare_is_better(num_tokens: int, is_better: bool) -> None:
    workers = make_pair(50)
    start(workers[1], make_group([2] * num_tokens, arrival=1))
    assert is_left(workers) is is_better


def test_a_worker_that_cannot_take_the_group_now_is_not_better() -> None:
    assert is_left(make_pair(50))
    for change in ("draining", "trial", "no seat", "too long", "no room", "swapped"):
        workers = make_pair(50, num_other_blocks=63 if change == "no room" else 100)
        other = workers[1]
        if change == "draining":
            other.is_draining = True
        elif change == "trial":
            other.trial = Cohort()
        elif change == "no seat":
            other.num_members = MOST_SEQUENCES
        elif change == "too long":
            other.max_model_len = 49
        elif change == "no room":
            other.blocks.allocate(12)
            other.num_watermark_blocks = 49  # 51 are available, one more than on the worker that is asked
        else:
            other.swapped.append(make_group([1], arrival=-1))
        assert not is_left(workers), change


def test_a_worker_that_has_no_room_does_not_leave_the_group_to_another() -> None:
    workers = make_pair(98)
    group = make_group(PROMPT)
    assert claim_start(group, workers[0], workers, LIMITS) is None and group.num_times_left == 0


def test_after_it_was_left_some_times_the_next_worker_takes_the_group() -> None:
    group = make_group(PROMPT)
    for _ in range(MAX_TIMES_LEFT):
        assert is_left(make_pair(50), group)
    assert not is_left(make_pair(50), group)


def pair_with_long_prefix(num_in_flight: int, num_more: int) -> tuple[list[WorkerState], SequenceGroup]:
    """Make a worker without anything to do, and a busy one with so many more tokens of the group's prompt."""
    prompt = [1] * (num_more + 2)
    workers = [make_worker(worker_id, num_blocks=200) for worker_id in ("asked", "other")]
    for num_cached in range(64, num_more + 64, 64):  # a step computes 64 tokens
        cache_prompt(workers[1], prompt[: min(num_cached, num_more)])
    for num_tokens in (num_in_flight - 1, 1) if num_in_flight else ():
        step = new_step(workers[1])
        step.plan.num_tokens.append(num_tokens)
        launch(workers[1], step)
    return workers, make_group(prompt)


@pytest.mark.parametrize(("num_in_flight", "is_waited_for"), [(100, True), (132, True), (133, False), (300, False)])
def test_an_idle_worker_leaves_a_group_to_a_busy_one_that_saves_more_than_it_has_to_do(
    num_in_flight: int, is_waited_for: bool
) -> None:
    """260 tokens of the prompt are cached; 128 of them are what a short step costs."""
    workers, group = pair_with_long_prefix(num_in_flight, 260)
    assert is_left(workers, group) is is_waited_for


@pytest.mark.parametrize(("num_more", "is_waited_for"), [(128, True), (124, False)])
def test_a_worker_with_nothing_in_flight_is_waited_for_longer_from_a_prefix_on_that_is_worth_a_short_step(
    num_more: int, is_waited_for: bool
) -> None:
    workers, group = pair_with_long_prefix(0, num_more)
    group.num_times_left = MAX_TIMES_LEFT
    assert is_left(workers, group) is is_waited_for


@pytest.mark.parametrize(
    ("num_in_flight", "num_cached_here", "is_waited_for"), [(60, 0, True), (61, 0, False), (0, 64, False)]
)
def test_what_is_cached_here_and_what_is_in_flight_there_count_against_a_longer_wait(
    num_in_flight: int, num_cached_here: int, is_waited_for: bool
) -> None:
    workers, group = pair_with_long_prefix(num_in_flight, 188)
    if num_cached_here:
        cache_prompt(workers[0], group.sequences[0].token_ids[:num_cached_here])
    group.num_times_left = MAX_TIMES_LEFT
    assert is_left(workers, group, is_busy=True) is is_waited_for


def test_even_for_a_long_prefix_a_worker_is_waited_for_only_so_often() -> None:
    workers, group = pair_with_long_prefix(8, 260)
    for _ in range(MAX_TIMES_WAITED):
        assert is_left(workers, group)
    assert not is_left(workers, group)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 2), max_size=8)), min_size=2, max_size=10),
    st.integers(1, 3),
)
def test_groups_with_long_prefixes_get_done_whoever_waits_for_whom(
    asked: list[tuple[int, list[int]]], num_workers: int
) -> None:
    """Requests with one of two prefixes of 200 tokens; between two of them workers plan or end a step."""
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=64, watermark=0.0, pipeline_depth=2))
    for number in range(num_workers):
        cluster.add_worker(f"w{number}", num_blocks=400)
    for number, (prefix, turns) in enumerate(asked):
        cluster.add([*[prefix + 1] * 200, number + 30], 3)
        for turn in turns:
            worker_id = f"w{turn % num_workers}"
            if cluster.start(worker_id) is None and cluster.in_flight[worker_id]:
                cluster.complete(worker_id)
    cluster.finish_and_compare()


def test_only_a_better_class_and_earlier_preempted_groups_go_before_a_swapped_group() -> None:
    worker = make_worker(num_host_blocks=4)
    swapped = make_group(PROMPT, arrival=5)
    assert goes_before_swapped(worker, swapped, LIMITS), "none is swapped"
    for group in (swapped, *(preempted := [make_group(PROMPT, arrival=arrival) for arrival in (4, 6)])):
        start(worker, group)
        worker.preempt(group)
    swapped.move_to(GroupState.SWAPPED)
    worker.swapped.append(swapped)
    assert [goes_before_swapped(worker, group, LIMITS) for group in (*preempted, swapped)] == [True, False, False]
    better, equal, too_long = (
        make_group(PROMPT, arrival=4, priority=priority, max_tokens=max_tokens)
        for priority, max_tokens in ((-1, 40), (0, 40), (-1, 400))
    )
    assert [goes_before_swapped(worker, group, LIMITS) for group in (better, equal, too_long)] == [True, False, False]
