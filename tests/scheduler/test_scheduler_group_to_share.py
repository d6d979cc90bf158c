"""Running group that goes on at a worker with little to do: each condition at its bound. Blocks hold 4 tokens."""

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_svc.core.fetch_costs import FetchMode
from scheduler_svc.core.fetching import BlockFetches, Fetch
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.load_sharing import MIN_DIFFERENCE, MIN_TOKENS_TO_GO, TIMES_BUSIER, group_to_share
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.sequence import Cohort, SequenceGroup
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import PlacedBlock, WorkerState
from tests.scheduler.worker_states import execute, launch_rows, make_group, make_worker, start

PROMPT = [1, 2, 3, 4, 5, 6]  # 2 blocks
LIMITS = WorkerLimits(max_num_seqs=64, pipeline_depth=2)


def worker_of(worker_id: str, **options: Any) -> WorkerState:
    return make_worker(
        worker_id, **{"num_blocks": 400, "num_seats": 64, "block_format": "f", "max_fetched_blocks": 99, **options}
    )


def run_on(worker: WorkerState, num_groups: int, num_sequences: int = 1, **options: Any) -> list[SequenceGroup]:
    """Start groups, of which each member has its prompt computed and one token known."""
    outputs: list[list[int]] = [[] for _ in range(num_sequences)]
    groups = [make_group(PROMPT, *outputs, arrival=number, **options) for number in range(num_groups)]
    for group in groups:
        launch_rows(worker, start(worker, group))
        execute(worker)
    return groups


def shared(
    worker: WorkerState, *others: WorkerState, mode: FetchMode = "always", limits: WorkerLimits = LIMITS
) -> tuple[WorkerState, SequenceGroup] | None:
    fetches = BlockFetches(mode, WaitingQueue(), {})
    return group_to_share(worker, [*others, worker], fetches, limits)


@pytest.mark.parametrize("num_here", [0, 1, 4])
def test_a_worker_is_much_busier_from_so_many_times_and_so_many_more_sequences_on(num_here: int) -> None:
    idle, busy = worker_of("idle"), worker_of("busy")
    run_on(idle, num_here)
    groups = run_on(busy, TIMES_BUSIER * num_here + MIN_DIFFERENCE - 1)
    assert shared(idle, busy) is None
    groups += run_on(busy, 1)
    found = shared(idle, busy)
    assert found is not None and found[0] is busy and found[1] in groups


def test_the_busiest_worker_gives_the_group_with_most_tokens_to_go() -> None:
    idle, busy, busiest = worker_of("idle"), worker_of("busy"), worker_of("busiest")
    run_on(busy, 8)
    run_on(busiest, 5)
    (longest,) = run_on(busiest, 1, max_tokens=60)
    run_on(busiest, 4)
    assert shared(idle, busy, busiest) == (busiest, longest)
    assert shared(idle, busiest, busy) == (busiest, longest)


def test_groups_with_fewer_tokens_to_go_are_not_looked_at() -> None:
    class CountingFetches(BlockFetches):
        num_asked = 0

        def pays(self, destination: WorkerState, source: WorkerState, num_blocks: int) -> bool:
            self.num_asked += 1
            return super().pays(destination, source, num_blocks)

    idle, busy = worker_of("idle"), worker_of("busy")
    run_on(busy, 8)
    fetches = CountingFetches("always", WaitingQueue(), {})
    assert group_to_share(idle, [busy, idle], fetches, LIMITS) is not None
    assert fetches.num_asked == 1


def test_of_a_group_the_member_with_most_tokens_to_go_counts() -> None:
    idle, busy = worker_of("idle"), worker_of("busy")
    run_on(busy, 4, max_tokens=50)
    (uneven,) = run_on(busy, 1, num_sequences=2, max_tokens=50)
    uneven.sequences[0].max_tokens, uneven.sequences[1].max_tokens = 2, 60
    assert shared(idle, busy) == (busy, uneven)


@pytest.mark.parametrize(("num_to_go", "is_moved"), [(MIN_TOKENS_TO_GO - 1, False), (MIN_TOKENS_TO_GO, True)])
def test_a_group_that_ends_soon_stays(num_to_go: int, is_moved: bool) -> None:
    idle, busy = worker_of("idle"), worker_of("busy")
    run_on(busy, 4, max_tokens=num_to_go + 1)  # one of the tokens is there
    assert (shared(idle, busy) is not None) == is_moved


@pytest.mark.parametrize(("num_others", "is_moved"), [(1, False), (2, True)])
def test_a_group_stays_whose_move_would_only_turn_the_difference_round(num_others: int, is_moved: bool) -> None:
    """The group has 3 of the sequences, and its double 6; one runs at the idle worker."""
    idle, busy = worker_of("idle"), worker_of("busy")
    run_on(idle, 1)
    (group,) = run_on(busy, 1, num_sequences=3)
    others = run_on(busy, 2 + num_others, max_tokens=MIN_TOKENS_TO_GO)  # these end soon
    assert all(other.live[0].num_output_tokens == 1 for other in others)
    assert shared(idle, busy) == ((busy, group) if is_moved else None)


@pytest.mark.parametrize(
    ("change", "is_moved"),
    [
        (lambda worker: None, True),
        (lambda worker: setattr(worker, "role", "decode"), True),
        (lambda worker: setattr(worker, "role", "prefill"), False),
        (lambda worker: setattr(worker, "is_draining", True), False),
        (lambda worker: setattr(worker, "trial", Cohort()), False),
        (lambda worker: worker.parked.update({make_group(PROMPT): None}), False),
        (lambda worker: worker.swapped.append(make_group(PROMPT)), False),
        (lambda worker: setattr(worker, "num_coming_fetched", 1), False),
        (lambda worker: setattr(worker, "enable_prefix_cache", False), False),
        (lambda worker: setattr(worker, "block_format", "g"), False),
        (lambda worker: setattr(worker, "max_fetched_blocks", 0), False),
    ],
)
def test_a_worker_takes_more_that_serves_output_has_nothing_to_go_on_with_and_finds_fetched_blocks(
    change: Callable[[WorkerState], object], is_moved: bool
) -> None:
    idle, busy = worker_of("idle"), worker_of("busy")
    run_on(busy, 5)
    change(idle)
    assert (shared(idle, busy) is not None) == is_moved


def test_a_worker_takes_no_more_while_it_keeps_blocks_that_a_step_is_to_place() -> None:
    idle, busy = worker_of("idle"), worker_of("busy")
    run_on(busy, 8)
    idle.unsent_placed[5] = PlacedBlock(3, 0, b"hash")
    assert shared(idle, busy) is None
    idle.unsent_placed.clear()
    assert shared(idle, busy) is not None


def test_a_worker_takes_no_more_while_a_group_waits_for_the_next_part_of_its_blocks() -> None:
    idle, busy = worker_of("idle"), worker_of("busy")
    run_on(busy, 8)
    fetches, group = BlockFetches("always", WaitingQueue(), {}), make_group(PROMPT, arrival=50)
    fetches._continuing[group] = Fetch(1, group, busy, idle, [], [], num_left=2)
    assert group_to_share(idle, [busy, idle], fetches, LIMITS) is None


def test_nothing_leaves_a_worker_that_tries_suspects() -> None:
    idle, busy = worker_of("idle"), worker_of("busy")
    run_on(busy, 5)
    busy.trial = Cohort()
    assert shared(idle, busy) is None


@pytest.mark.parametrize(("destination", "is_moved"), [("idle", False), ("third", True), (None, True)])
def test_one_group_at_a_time_leaves_for_a_worker(destination: str | None, is_moved: bool) -> None:
    idle, busy = worker_of("idle"), worker_of("busy")
    groups = run_on(busy, 6)
    launch_rows(busy, groups[0])
    busy.set_aside(groups[0])
    groups[0].destination = destination
    assert groups[0].state is GroupState.PARKED
    assert (shared(idle, busy) is not None) == is_moved


def suspect(group: SequenceGroup) -> None:
    group.cohort = Cohort({group: None})


def begin_anew(group: SequenceGroup) -> None:
    group.live[0].num_computed_tokens = 0


def hide_a_member(group: SequenceGroup) -> None:
    group.live[1].use_prefix_cache = False


@pytest.mark.parametrize("change", [suspect, begin_anew, hide_a_member])
def test_a_group_stays_that_is_suspected_or_has_prompt_to_compute_or_would_not_be_found(
    change: Callable[[SequenceGroup], None],
) -> None:
    idle, busy = worker_of("idle"), worker_of("busy")
    groups = run_on(busy, 3, num_sequences=2)
    for group in groups[:2]:
        change(group)
    assert shared(idle, busy) == (busy, groups[2])
    change(groups[2])
    assert shared(idle, busy) is None


@pytest.mark.parametrize(
    ("options", "is_moved"),
    [
        ({"num_seats": 3}, True),
        ({"num_seats": 2}, False),
        ({"num_blocks": 34}, True),  # 1 for the prompt's full block, 11 for each of three times 46 tokens less that
        ({"num_blocks": 30}, False),
        ({"max_model_len": 46}, True),
        ({"max_model_len": 45}, False),
    ],
)
def test_a_group_moves_only_to_where_it_can_stay(options: dict[str, Any], is_moved: bool) -> None:
    idle, busy = worker_of("idle", **options), worker_of("busy")
    run_on(busy, 3, num_sequences=3)
    assert (shared(idle, busy) is not None) == is_moved


@pytest.mark.parametrize(("num_free", "is_moved"), [(3, True), (2, False)])
def test_every_member_finds_a_seat_that_is_free_now(num_free: int, is_moved: bool) -> None:
    idle, busy = worker_of("idle"), worker_of("busy")
    run_on(busy, 3, num_sequences=3)
    del idle.free_seats[num_free:]
    assert (shared(idle, busy) is not None) == is_moved


@pytest.mark.parametrize(("num_watermark_blocks", "is_moved"), [(3, True), (4, False)])
def test_its_blocks_leave_the_reserve_of_the_destination_alone(num_watermark_blocks: int, is_moved: bool) -> None:
    """The group holds 2 blocks, and 5 are available."""
    idle, busy = worker_of("idle", num_blocks=100), worker_of("busy")
    run_on(busy, 5)
    idle.num_watermark_blocks = num_watermark_blocks
    held = [idle.blocks.allocate_block() for _ in range(95)]
    assert len(held) == 95 and idle.blocks.num_available_blocks == 5
    assert (shared(idle, busy) is not None) == is_moved


@pytest.mark.parametrize(("prompt", "is_moved"), [([1, 2, 3, 4], True), ([1, 2, 3], False)])
def test_a_group_without_a_full_block_has_nothing_to_fetch(prompt: list[int], is_moved: bool) -> None:
    idle, busy = worker_of("idle"), worker_of("busy")
    for number in range(5):
        launch_rows(busy, start(busy, make_group(prompt, arrival=number)))
        execute(busy)
    assert (shared(idle, busy) is not None) == is_moved


@pytest.mark.parametrize(("fetch_blocks_per_s", "is_moved"), [(26.0, True), (24.0, False)])
def test_a_group_moves_if_its_blocks_are_fetched_more_quickly_than_computed(
    fetch_blocks_per_s: float, is_moved: bool
) -> None:
    idle, busy = worker_of("idle"), worker_of("busy")
    run_on(busy, 5)
    idle.costs = PreemptionCosts(prefill_tokens_per_s=100.0, fetch_blocks_per_s=fetch_blocks_per_s)  # 4 tokens each
    assert (shared(idle, busy, mode="auto") is not None) == is_moved
    assert shared(idle, busy, mode="never") is None


def test_blocks_that_members_share_travel_once_and_take_room_once() -> None:
    idle, busy = worker_of("idle", num_blocks=100), worker_of("busy")
    (group,) = run_on(busy, 1, num_sequences=3)
    num_blocks = len({block for each in group.live for block in each.block_table})
    assert num_blocks < sum(len(each.block_table) for each in group.live)
    run_on(busy, 5, max_tokens=MIN_TOKENS_TO_GO)
    for _ in range(100 - num_blocks):
        idle.blocks.allocate_block()
    assert shared(idle, busy) == (busy, group)
    idle.blocks.allocate_block()
    assert shared(idle, busy) is None
