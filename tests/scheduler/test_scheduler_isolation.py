"""Requests that make steps fail or end workers are found and fail alone. Blocks hold 4 tokens."""

import random
from collections import deque
from collections.abc import Callable
from math import ceil, log2

import pytest

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.isolation import (
    LATELY_S,
    MAX_EXCUSED_LOSSES,
    MAX_FAILED_STEPS,
    MAX_LOSSES,
    MAX_WORKERS_TRIED,
    Isolation,
)
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.waiting_queue import WaitingQueue
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.worker_states import launch, make_group, make_worker, new_step, start

Poison = dict[SequenceGroup, int]  # the position at which it shows its effect, in whichever of its members
Effect = Callable[[Sequence, int, int], bool]  # of a row of a poisoned group: its position and number of tokens


class SickCluster:
    """Workers whose steps fail, or which die, when they compute a certain position of a certain group."""

    def __init__(self, *workers: str, depth: int = 2, budget: int = 64, num_blocks: int = 300) -> None:
        config = SchedulerConfig(max_num_batched_tokens=budget, pipeline_depth=depth, watermark=0.0, max_num_seqs=64)
        self.cluster = Cluster(config)
        self.num_blocks = num_blocks
        self.poison: Poison = {}
        self.has_effect: Effect = self._computes_poison
        self.failed: list[SequenceGroup] = []
        self.num_incidents = 0
        self.num_steps: dict[str, int] = dict.fromkeys(workers, 0)
        for worker_id in workers:
            self.add_worker(worker_id)

    def add_worker(self, worker_id: str) -> None:
        self.cluster.add_worker(worker_id, num_blocks=self.num_blocks, num_host_blocks=16)

    def is_poisoned(self, plan: StepPlan) -> bool:
        return any(
            sequence.group in self.poison and self.has_effect(sequence, position, num_tokens)
            for sequence, position, num_tokens in zip(plan.sequences, plan.positions, plan.num_tokens, strict=True)
        )

    def _computes_poison(self, sequence: Sequence, position: int, num_tokens: int) -> bool:
        return position <= self.poison[sequence.group] < position + num_tokens

    def lose(self, worker_id: str, *, lives_on: bool = False, hangs: bool = False) -> None:
        """Kill a worker, or break the link to it; it is back at once, empty."""
        self.num_incidents += 1
        self.failed += self.cluster.lose_worker(worker_id, is_proven=hangs)
        self.cluster.scheduler.record_return(worker_id, is_same_process=lives_on)
        self.add_worker(worker_id)

    def go_on(self, worker_id: str, *, kills: bool) -> bool:
        """Fills the pipeline of a worker, and executes its oldest step. False: nothing to do."""
        while self.cluster.start(worker_id) is not None:
            self.cluster.scheduler.check()
        plans: deque[StepPlan] = self.cluster.plans[worker_id]
        if not plans:
            return False
        self.num_steps[worker_id] += 1
        if not self.is_poisoned(plans[0]):
            self.cluster.complete(worker_id)
        elif kills:
            self.lose(worker_id)
        else:
            self.num_incidents += 1
            self.failed += self.cluster.blame_step(worker_id)
        self.cluster.scheduler.check()
        return True

    def run(self, *, kills: bool) -> None:
        """Run to the end, round robin."""
        while any(not sequence.is_finished for sequence in self.cluster.sequences):
            moved = [self.go_on(worker_id, kills=kills) for worker_id in self.num_steps]
            assert any(moved), "nobody moves"
        for worker_id in self.num_steps:
            while self.go_on(worker_id, kills=kills):
                pass

    def assert_only_the_poisoned_failed(self) -> None:
        assert set(self.failed) == set(self.poison) and len(self.failed) == len(self.poison)
        for sequence in self.cluster.sequences:
            if sequence.group not in self.poison and not sequence.group.awaits_host:
                assert sequence.num_output_tokens == sequence.max_tokens
        self.cluster.assert_outputs_are_unconstrained()
        self.cluster.assert_idle_and_unleaked()


def add_mixed(site: SickCluster, num_groups: int, max_tokens: int = 25) -> list[SequenceGroup]:
    """Short and long prompts, samples and searches; each has more than 30 positions."""
    groups = []
    for number in range(num_groups):
        prompt = [number + 1, *range(1, 12)] if number % 3 else [number + 1] * 40
        num_sequences = (1, 3, 1, 2)[number % 4]
        is_beam = number % 4 == 3
        groups.append(site.cluster.add_group(prompt, num_sequences, max_tokens, is_beam=is_beam))
    return groups


@pytest.mark.parametrize("position", [0, 9, 12, 30])
@pytest.mark.parametrize("num_groups", [1, 2, 9])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_raises_fails_the_one_that_makes_it_raise(num_groups: int, position: int, depth: int) -> None:
    site = SickCluster("a", depth=depth)
    groups = add_mixed(site, num_groups)
    site.poison = {groups[num_groups // 2]: position}
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()
    assert MAX_FAILED_STEPS <= site.num_incidents <= max(MAX_FAILED_STEPS, 1 + ceil(log2(num_groups)))


@pytest.mark.parametrize("seed", range(4))
def test_several_that_make_steps_raise_are_told_from_the_others(seed: int) -> None:
    rng = random.Random(seed)
    site = SickCluster("a", "b", num_blocks=60, budget=rng.choice([16, 64]))
    groups = add_mixed(site, 12)
    site.poison = {group: rng.randrange(30) for group in rng.sample(groups, 3)}
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()
    assert site.num_incidents <= 3 * (MAX_FAILED_STEPS + ceil(log2(12)))


@pytest.mark.parametrize("workers", ["a", "ab"])
@pytest.mark.parametrize("position", [0, 12, 30])
@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_one_that_ends_workers_ends_three_and_fails_alone(kind: int, position: int, workers: str) -> None:
    site = SickCluster(*workers, num_blocks=100, budget=24)
    groups = add_mixed(site, 8, max_tokens=20)
    site.poison = {groups[4 + kind]: position}
    site.run(kills=True)
    site.assert_only_the_poisoned_failed()
    assert site.num_incidents == MAX_LOSSES


@pytest.mark.parametrize("seed", range(3))
def test_workers_that_die_again_and_again_fail_nobody(seed: int) -> None:
    """Each in its turn dies as soon as the other has computed again what it took over, and gone on a little."""
    rng = random.Random(seed)
    site = SickCluster("a", "b", num_blocks=200, budget=128)
    add_mixed(site, 8, max_tokens=50)
    while any(not sequence.is_finished for sequence in site.cluster.sequences):
        for worker_id in "ab":
            for _ in range(rng.randrange(9, 15)):
                site.go_on("a", kills=False)
                site.go_on("b", kills=False)
            site.lose(worker_id)
    assert site.failed == [] and site.num_incidents >= 4
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()


def test_the_first_loss_of_a_worker_puts_nobody_apart() -> None:
    site = SickCluster("a")
    groups = add_mixed(site, 6)
    for _ in range(4):
        site.go_on("a", kills=False)
    site.cluster.start("a")
    site.lose("a")
    assert all(group.cohort is None for group in groups)


def test_who_came_on_between_two_losses_is_not_suspected() -> None:
    site = SickCluster("a", depth=1)
    group = site.cluster.add([1, 2, 3], 20).group
    for comes_on, is_suspect in ((True, False), (True, False), (False, True)):
        for _ in range(3 if comes_on else 0):
            site.go_on("a", kills=False)
        assert site.cluster.start("a") is not None
        site.lose("a")
        assert (group.cohort is not None) is is_suspect
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()


def test_a_worker_serves_all_others_while_suspects_are_tried_on_another() -> None:
    site = SickCluster("a", "b", depth=1)
    suspect = site.cluster.add([1] * 100, 20)
    for _ in range(2):
        site.cluster.start("a")
        site.lose("a")
    others = [site.cluster.add([2, 3, number + 1], 10) for number in range(5)]
    assert site.go_on("a", kills=False) and suspect.worker_id == "a"
    assert site.cluster.start("b") is not None
    assert [each.worker_id for each in others] == ["b"] * 5


def test_suspects_and_others_take_turns_on_a_worker() -> None:
    site = SickCluster("a", depth=1)
    groups = [site.cluster.add([number + 1] * 20, 30).group for number in range(6)]
    while not all(sequence.num_output_tokens > 2 for sequence in site.cluster.sequences):
        site.go_on("a", kills=False)
    for _ in range(2):
        assert site.cluster.start("a") is not None
        site.lose("a")
    suspects = [group for group in groups if group.cohort is not None]
    innocents = [group for group in groups if group.cohort is None]
    assert len(suspects) >= 2 and len(innocents) >= 2
    turns = []
    while any(group.cohort is not None for group in suspects):
        plan = site.cluster.start("a")
        assert plan is not None
        turns.append({sequence.group for sequence in plan.sequences})
        site.cluster.complete("a")
    trials = [turn for turn in turns if turn <= set(suspects) and len(turn) == 1]
    assert len(trials) >= len(suspects) and len(turns) - len(trials) >= len(suspects) - 1
    assert not any(group.is_finished for group in innocents), "suspects are not left for the end"
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()


def test_others_have_their_turn_while_the_beams_of_a_trial_wait_for_a_decision() -> None:
    site = SickCluster("a", depth=1)
    suspects = site.cluster.add_group([1, 2, 3], 2, 20, is_beam=True)
    site.cluster.start("a")
    site.cluster.blame_step("a")
    other = site.cluster.add([4, 5, 6], 20)
    plan = site.cluster.start("a")
    assert plan is not None
    assert plan.sequences == suspects.live
    step = site.cluster.in_flight["a"].popleft()
    site.cluster.scheduler.apply("a", step.step_id, site.cluster.workers["a"].execute(step))
    assert suspects.awaits_decision
    plan = site.cluster.start("a")
    assert plan is not None
    assert plan.sequences == [other]


def test_who_had_yet_to_come_back_to_its_place_had_no_part_in_a_loss() -> None:
    site = SickCluster("a", depth=1, budget=8)
    one = site.cluster.add([1] * 20, 30)
    while one.num_output_tokens < 3:
        site.go_on("a", kills=False)
    for _ in range(1 + MAX_EXCUSED_LOSSES):
        assert site.cluster.start("a") is not None
        site.lose("a")
    assert one.group.cohort is None and not site.failed
    assert site.cluster.start("a") is not None
    site.lose("a")
    assert one.group.cohort is not None, "excuses are used up"


def test_who_had_come_back_to_its_place_and_not_past_it_had_no_part_in_a_loss() -> None:
    site = SickCluster("a", depth=1, budget=11)
    one = site.cluster.add([1] * 20, 30)
    while one.num_output_tokens < 3:
        site.go_on("a", kills=False)
    site.cluster.start("a")  # its 23rd token
    site.lose("a")
    for num_steps, is_suspect in ((1, False), (2, True)):
        for _ in range(num_steps):
            site.go_on("a", kills=False)
        site.cluster.start("a")
        site.lose("a")
        assert (one.group.cohort is not None) is is_suspect


@pytest.mark.parametrize(("num_computed", "is_suspect"), [(4, False), (5, True)])
def test_a_member_that_had_no_part_in_the_first_loss_may_have_caused_the_second_at_its_last_token(
    num_computed: int, is_suspect: bool
) -> None:
    isolation = Isolation(WaitingQueue(), WorkerLimits(max_num_seqs=16, pipeline_depth=2))
    worker = make_worker()
    group = start(worker, make_group([1] * 4, [2], [3]))
    for sequence, num_tokens in zip(group.sequences, (2, num_computed), strict=True):
        step = new_step(worker)
        step.plan.sequences, step.plan.positions, step.plan.num_tokens = [sequence], [0], [num_tokens]
        worker.in_flight.clear()
        launch(worker, step)
        assert isolation.record_worker_loss(worker, 0.0, is_proven=False) == []
    assert (group.cohort is not None) is is_suspect


@pytest.mark.parametrize(
    ("first", "second", "is_suspect"),
    [
        (range(1), range(1), True),
        (range(1, 2), range(1), False),
        (range(2, 4), range(2), False),
        (range(2, 4), range(1, 3), True),
        (range(2, 4), range(4), True),
    ],
)
def test_who_computed_the_first_position_of_the_row_that_was_lost_may_have_caused_the_next_loss(
    first: range, second: range, is_suspect: bool
) -> None:
    isolation = Isolation(WaitingQueue(), WorkerLimits(max_num_seqs=16, pipeline_depth=2))
    worker = make_worker()
    group = start(worker, make_group([1] * 9))
    for row in (first, second):
        step = new_step(worker)
        step.plan.sequences, step.plan.positions, step.plan.num_tokens = group.sequences, [row.start], [len(row)]
        worker.in_flight.clear()
        launch(worker, step)
        assert isolation.record_worker_loss(worker, 0.0, is_proven=False) == []
    assert (group.cohort is not None) is is_suspect


def lose_alone(*losses: dict[str, bool]) -> list[SequenceGroup]:
    """Lose workers with one group alone on them, which gets no further, each by `SickCluster.lose`; who is failed."""
    site = SickCluster("a", "b", depth=1)
    site.cluster.add([1] * 20, 30)
    for loss in losses:
        (worker_id,) = [each for each in "ab" if site.cluster.start(each) is not None]
        site.lose(worker_id, **loss)
        site.cluster.scheduler.check()
    failed = list(site.failed)
    if not failed:
        site.run(kills=False)
        site.assert_only_the_poisoned_failed()
    return failed


DEATH, BROKEN_LINK, HANG = {"lives_on": False}, {"lives_on": True}, {"lives_on": True, "hangs": True}


@pytest.mark.parametrize(
    ("losses", "is_failed"),
    [
        ([DEATH] * 2, False),
        ([DEATH] * 3, True),
        ([HANG] * 3, True),
        ([DEATH, BROKEN_LINK, BROKEN_LINK], False),
        ([BROKEN_LINK, DEATH, BROKEN_LINK, BROKEN_LINK, DEATH], False),
        ([BROKEN_LINK, DEATH, DEATH, DEATH], True),
        ([BROKEN_LINK] * MAX_EXCUSED_LOSSES + [DEATH] * (MAX_LOSSES - 1), False),
        ([BROKEN_LINK] * (MAX_EXCUSED_LOSSES + MAX_LOSSES - 1), False),
        ([BROKEN_LINK] * (MAX_EXCUSED_LOSSES + MAX_LOSSES), True),
    ],
)
def test_a_broken_link_to_a_process_that_lives_on_is_excused_three_times(
    losses: list[dict[str, bool]], is_failed: bool
) -> None:
    assert bool(lose_alone(*losses)) is is_failed


def test_who_is_excused_is_a_suspect_no_more_and_shares_steps_again() -> None:
    site = SickCluster("a", depth=1)
    one = site.cluster.add([1] * 20, 30)
    for lives_on in (False, True):
        assert site.cluster.start("a") is not None
        site.lose("a", lives_on=lives_on)
    assert one.group.cohort is None
    other = site.cluster.add([2] * 20, 30)
    plan = site.cluster.start("a")
    assert plan is not None and plan.sequences == [one, other]
    site.lose("a")
    assert one.group.cohort is not None and other.group.cohort is None
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()


def test_who_is_paused_is_excused_too() -> None:
    site = SickCluster("a", depth=1)
    one = site.cluster.add([1] * 20, 30)
    site.cluster.start("a")
    site.lose("a")
    site.cluster.start("a")
    site.failed += site.cluster.lose_worker("a")
    site.cluster.scheduler.pause(one.group, keep_on_host=False)
    site.cluster.scheduler.record_return("a", is_same_process=True)
    site.add_worker("a")
    site.cluster.scheduler.resume(one.group)
    assert one.group.cohort is None
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()


def test_excuses_are_not_forgotten_when_a_worker_is_forgiven() -> None:
    site = SickCluster("a", depth=1)
    one = site.cluster.add([1] * 20, 30)
    for _ in range(MAX_EXCUSED_LOSSES + MAX_LOSSES):
        assert not one.is_finished
        site.cluster.start("a")
        site.lose("a", lives_on=True)
        site.cluster.scheduler.forgive_worker("a")
    assert site.failed == [one.group]


def test_a_suspect_that_does_not_know_its_cohort_is_noticed() -> None:
    site = SickCluster("a", depth=1)
    group = site.cluster.add([1, 2, 3], 4).group
    fail_step(site, "a")
    site.cluster.scheduler._isolation.check()
    group.cohort = None
    with pytest.raises(AssertionError):
        site.cluster.scheduler._isolation.check()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("effect", ["any row", "long row", "late row", "first member", "last member"])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_one_that_ends_workers_wherever_it_computes_is_found_after_any_other_loss(
    num_sequences: int, effect: str, seed: int
) -> None:
    """The other loss comes when only some members are in flight, and some are not as far as others."""
    rng = random.Random(seed)
    site = SickCluster("a", "b", depth=rng.choice([1, 2]), budget=rng.choice([8, 12]))
    poisoned = site.cluster.add_group([1] * 14, num_sequences, max_tokens=20)
    others = [site.cluster.add([number + 2] * rng.randrange(2, 20), 25) for number in range(rng.randrange(3))]
    while max(sequence.num_output_tokens for sequence in poisoned.sequences) < 5:
        site.go_on("a", kills=False)
        site.go_on("b", kills=False)
    for _ in range(rng.randrange(3)):  # losses without a cause among the requests
        for _ in range(rng.randrange(1, 4)):
            site.go_on("a", kills=False)
        site.lose(rng.choice("ab"))
    site.has_effect = {
        "any row": lambda sequence, position, num_tokens: True,
        "long row": lambda sequence, position, num_tokens: num_tokens > 1 or sequence.num_output_tokens > 12,
        "late row": lambda sequence, position, num_tokens: position >= 17,
        "first member": lambda sequence, position, num_tokens: sequence is poisoned.sequences[0],
        "last member": lambda sequence, position, num_tokens: sequence is poisoned.sequences[-1],
    }[effect]
    site.poison = {poisoned: 0}
    site.num_incidents = 0
    site.run(kills=True)
    site.assert_only_the_poisoned_failed()
    assert all(other.num_output_tokens == 25 for other in others)
    assert site.num_incidents <= MAX_LOSSES + MAX_EXCUSED_LOSSES + 4  # not each of them leaves it alone


def test_where_workers_are_lost_for_other_reasons_one_loss_alone_makes_nobody_guilty() -> None:
    site = SickCluster("a", depth=1)
    site.lose("a")
    for number in range(2):
        site.cluster.add([number + 1] * 4, 30)
    for _ in range(2):
        plan = site.cluster.start("a")
        assert plan is not None and len(plan.sequences) == 2
        site.lose("a")
    for num_guilty in (0, 0, 1):  # they are tried by turns
        plan = site.cluster.start("a")
        assert plan is not None and len(plan.sequences) == 1
        site.lose("a")
        assert len(site.failed) == num_guilty


@pytest.mark.parametrize(("passed_s", "num_guilty"), [(LATELY_S, 0), (LATELY_S + 1.0, 1)])
def test_a_loss_long_ago_no_longer_speaks_for_another_reason(passed_s: float, num_guilty: int) -> None:
    site = SickCluster("a", depth=1)
    site.lose("a")
    site.cluster.now_s = passed_s
    for number in range(2):
        site.cluster.add([number + 1] * 4, 30)
    for _ in range(3):
        assert site.cluster.start("a") is not None
        site.lose("a")
    assert len(site.failed) == num_guilty


def fail_step(site: SickCluster, worker_id: str, *, is_disbelieved: bool = False) -> None:
    """Fail the next step of a worker."""
    plan = site.cluster.start(worker_id)
    assert plan is not None
    site.cluster.fail_steps(worker_id)
    assert site.cluster.scheduler.record_failed_step([plan], is_disbelieved=is_disbelieved) == []
    site.cluster.scheduler.check()


@pytest.mark.parametrize("num_groups", [2, 3, 4, 9])
def test_the_groups_of_a_failed_step_are_tried_in_halves(num_groups: int) -> None:
    site = SickCluster("a", depth=1)
    groups = [site.cluster.add([number + 1, 2, 3], 4).group for number in range(num_groups)]
    fail_step(site, "a")
    cohorts = [list(cohort.groups) for cohort in dict.fromkeys(group.cohort for group in groups) if cohort is not None]
    assert sorted(map(len, cohorts)) == [num_groups // 2, (num_groups + 1) // 2]


@pytest.mark.parametrize("is_disbelieved", [True, False])
def test_a_worker_is_at_fault_if_its_answer_was_not_believed_and_another_passes_the_position(
    is_disbelieved: bool,
) -> None:
    site = SickCluster("a", "b", depth=1)
    group = site.cluster.add([1, 2, 3], 4).group
    fail_step(site, "a", is_disbelieved=is_disbelieved)
    assert site.cluster.start("a") is None, "it is tried where it has not failed"
    site.cluster.step("b")
    assert group.cohort is None
    assert site.cluster.at_fault == ({"a"} if is_disbelieved else set())


@pytest.mark.parametrize("is_disbelieved", [True, False])
def test_what_a_worker_computed_of_a_group_is_not_found_any_more_if_its_answer_was_not_believed(
    is_disbelieved: bool,
) -> None:
    site = SickCluster("a", depth=1)
    group = site.cluster.add([1] * 9, 4).group
    site.cluster.step("a")
    fail_step(site, "a", is_disbelieved=is_disbelieved)
    assert site.cluster.stats("a").num_cached_blocks == 0
    site.cluster.scheduler.finish_group(group)
    assert site.cluster.stats("a").num_cached_blocks == (0 if is_disbelieved else 2)


@pytest.mark.parametrize("stopped_by", ["the rollback", "a pause"])
def test_what_was_computed_of_a_group_that_was_stopped_since_is_not_found_either(stopped_by: str) -> None:
    site = SickCluster("a")
    group = site.cluster.add_group([1] * 9, 2 if stopped_by == "the rollback" else 1, 4)
    site.cluster.step("a")
    plan = site.cluster.start("a")
    assert plan is not None and bool(plan.copies) is (stopped_by == "the rollback")
    if stopped_by == "a pause":
        site.cluster.scheduler.pause(group, keep_on_host=False)
    site.cluster.fail_steps("a")
    assert group.state is not GroupState.RUNNING and site.cluster.stats("a").num_cached_blocks >= 2
    site.cluster.scheduler.record_failed_step([plan], suspects=[group], is_disbelieved=True)
    site.cluster.scheduler.check()
    assert site.cluster.stats("a").num_cached_blocks == 0


def test_a_worker_that_passes_the_position_of_its_own_failed_step_is_not_at_fault() -> None:
    site = SickCluster("a", depth=1)
    group = site.cluster.add([1, 2, 3], 4).group
    fail_step(site, "a", is_disbelieved=True)
    site.cluster.step("a")
    assert group.cohort is None and site.cluster.at_fault == set()


def test_who_failed_only_on_a_forgiven_worker_is_no_suspect_and_goes_on() -> None:
    site = SickCluster("a", depth=1)
    group = site.cluster.add([1, 2, 3], 4).group
    fail_step(site, "a")
    site.cluster.scheduler.forgive_worker("a")
    site.cluster.scheduler.check()
    assert group.cohort is None
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()


def test_who_failed_elsewhere_too_stays_a_suspect_and_the_forgiven_worker_is_not_at_fault() -> None:
    site = SickCluster("a", "b", "c", depth=1)
    group = site.cluster.add([1, 2, 3], 4).group
    fail_step(site, "a", is_disbelieved=True)
    fail_step(site, "b")
    site.cluster.scheduler.forgive_worker("a")
    assert group.cohort is not None
    site.cluster.step("c")
    assert group.cohort is None and site.cluster.at_fault == set()


def test_who_was_also_on_a_lost_worker_stays_a_suspect_when_the_other_is_forgiven() -> None:
    site = SickCluster("a", depth=1)
    group = site.cluster.add([1, 2, 3], 4).group
    assert site.cluster.start("a") is not None
    site.lose("a")
    fail_step(site, "a")
    site.cluster.scheduler.forgive_worker("a")
    assert group.cohort is not None
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()


def test_a_worker_is_forgiven_by_a_paused_suspect_too_and_one_that_ends_is_forgotten() -> None:
    site = SickCluster("a", depth=1)
    first, second = (site.cluster.add([number + 1, 2, 3], 4).group for number in range(2))
    fail_step(site, "a")
    for group in (first, second):
        site.cluster.scheduler.pause(group, keep_on_host=False)
    site.cluster.scheduler.forgive_worker("a")
    site.cluster.scheduler.resume(first)
    assert first.cohort is None
    site.cluster.scheduler.finish_group(second)
    site.cluster.scheduler.check()
    site.run(kills=False)
    assert site.failed == []


def test_suspects_get_room_from_those_who_have_no_part_in_their_trial() -> None:
    site = SickCluster("a", depth=1, num_blocks=20)
    suspect = site.cluster.add([1] * 40, 30, priority=1)  # 18 blocks at its longest
    for _ in range(2):
        site.cluster.start("a")
        site.lose("a")
    first = site.cluster.add([2] * 30, 20)
    second = site.cluster.add([3] * 30, 20)
    assert suspect.group.cohort is not None
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()
    assert first.num_preemptions + second.num_preemptions > 0


def test_a_suspect_gets_room_on_a_worker_that_is_full_of_others() -> None:
    site = SickCluster("a", depth=1, num_blocks=20)
    first, second = site.cluster.add([2] * 30, 20), site.cluster.add([3] * 30, 20)
    site.cluster.step("a")  # 16 blocks
    site.add_worker("b")
    suspect = site.cluster.add([1] * 40, 30)
    site.cluster.start("b")
    site.lose("b")
    site.cluster.start("b")
    site.cluster.lose_worker("b")
    assert site.cluster.step("a").sequences == [suspect]
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()


def test_a_suspect_that_grows_in_its_trial_gets_room_from_those_who_have_no_part_in_it() -> None:
    site = SickCluster("a", depth=2, num_blocks=20)
    first, second = site.cluster.add([2] * 30, 20), site.cluster.add([3] * 30, 20)
    site.cluster.step("a")
    site.add_worker("b")
    suspect = site.cluster.add([1] * 40, 30)
    while len(suspect.token_ids) < 48:
        site.cluster.step("b")
    for _ in range(2):
        site.cluster.start("b")
        site.lose("b")
    site.cluster.remove_worker("b")
    for num_preempted in (1, 2):  # for its 12 blocks, and for the 13th
        plan = site.cluster.start("a")
        assert plan is not None
        assert plan.sequences == [suspect]
        assert first.num_preemptions + second.num_preemptions == num_preempted
    assert suspect.num_preemptions == 0
    site.num_steps = {"a": 0}
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()


def test_suspects_that_start_share_the_budget_to_its_last_token_and_count_what_they_lost() -> None:
    site = SickCluster("a", depth=1, budget=4)
    for number in range(4):
        site.cluster.add([number], 30)
    for _ in range(2):
        site.cluster.step("a")
    site.cluster.start("a")
    site.cluster.blame_step("a")  # they are tried in halves
    site.lose("a")
    plan = site.cluster.start("a")
    assert plan is not None
    assert plan.num_tokens == [3, 1]
    assert site.cluster.stats("a").num_recomputed_tokens == 2 + 2


def test_suspects_of_a_failed_step_that_lose_their_worker_are_tried_elsewhere() -> None:
    site = SickCluster("a", "b")
    groups = add_mixed(site, 8)
    site.cluster.start("a")
    site.failed += site.cluster.blame_step("a")
    assert any(group.cohort is not None for group in groups)
    site.cluster.lose_worker("a")
    del site.num_steps["a"]
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()
    assert all(group.cohort is None for group in groups)


def test_a_suspect_that_is_cancelled_is_forgotten() -> None:
    site = SickCluster("a")
    groups = add_mixed(site, 4)
    site.cluster.start("a")
    site.cluster.blame_step("a")
    for group in groups[:2]:
        site.cluster.scheduler.finish_group(group)
    site.cluster.scheduler.check()
    site.run(kills=False)
    assert site.failed == []
    site.cluster.assert_idle_and_unleaked()


def test_who_has_moved_since_its_step_failed_is_tried_where_it_is() -> None:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=24, pipeline_depth=2, watermark=0.0))
    cluster.add_worker("a", num_blocks=200)
    for number in range(3):  # with their 104 tokens they are too large for the other worker
        cluster.add([number + 1] * 4, 100)
    for _ in range(2):
        cluster.step("a")
    moving = cluster.add([7] * 60, 10)
    cluster.step("a")
    plan = cluster.start("a")
    assert plan is not None and moving in plan.sequences
    cluster.add_worker("b", num_blocks=22)
    cluster.scheduler.workers.drain_worker("a")
    cluster.start("b")
    assert moving.worker_id == "b"
    assert cluster.blame_step("a") == []
    cluster.scheduler.check()
    cluster.run_until_idle()
    assert all(sequence.num_output_tokens == sequence.max_tokens for sequence in cluster.sequences)
    cluster.assert_outputs_are_unconstrained()


@pytest.mark.parametrize("depth", [1, 2])
def test_innocents_do_not_fail_on_a_worker_that_fails_every_step_while_another_is_sound(depth: int) -> None:
    site = SickCluster("a", "b", depth=depth)
    cluster = site.cluster
    add_mixed(site, 12)
    for _ in range(3):
        site.go_on("a", kills=False)
        site.go_on("b", kills=False)
    while any(not sequence.is_finished for sequence in cluster.sequences):
        while cluster.start("a") is not None:
            pass
        if cluster.plans["a"]:
            site.num_incidents += 1
            site.failed += cluster.blame_step("a")
        cluster.scheduler.check()
        assert site.go_on("b", kills=False) or cluster.in_flight["a"] or cluster.start("a") is not None
    assert 0 < site.num_incidents <= 2  # who failed there does not come back to it
    while cluster.in_flight["a"]:
        cluster.complete("a")
    site.assert_only_the_poisoned_failed()


def test_who_fails_steps_on_two_workers_is_guilty_and_so_is_who_fits_only_one() -> None:
    site = SickCluster("a", "b", num_blocks=20)
    either = site.cluster.add([1] * 20, 10).group
    site.poison = {either: 5}
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()
    assert all(num_steps > 0 for num_steps in site.num_steps.values()) and site.num_incidents == MAX_FAILED_STEPS
    site.cluster.remove_worker("b")
    del site.num_steps["b"]
    wide = site.cluster.add([2] * 60, 10).group
    site.cluster.add_worker("b", num_blocks=10, num_host_blocks=16)
    site.num_steps["b"] = 0
    site.poison[wide] = 5
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()


@pytest.mark.parametrize(("num_workers", "num_failures"), [(1, 3), (2, 3), (3, 3), (4, 4), (5, 4), (6, 4)])
def test_who_fails_steps_is_tried_on_each_worker_but_on_no_more_than_four(num_workers: int, num_failures: int) -> None:
    site = SickCluster(*"abcdef"[:num_workers], num_blocks=20)
    group = site.cluster.add([1] * 20, 10).group
    site.poison = {group: 5}
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()
    assert site.num_incidents == num_failures
    num_tried = sum(num_steps > 0 for num_steps in site.num_steps.values())
    assert num_tried == min(num_workers, MAX_WORKERS_TRIED)


def test_a_suspect_that_is_paused_is_one_again_when_it_goes_on() -> None:
    site = SickCluster("a")
    groups = add_mixed(site, 4)
    scheduler = site.cluster.scheduler
    site.cluster.start("a")
    site.cluster.blame_step("a")
    for group in groups[:2]:
        scheduler.pause(group, keep_on_host=True)
    scheduler.check()
    while site.go_on("a", kills=False):
        pass
    assert all(group.cohort is None for group in groups)
    for group in groups[:2]:
        scheduler.resume(group)
        scheduler.check()
    cohorts = [group.cohort for group in groups[:2]]
    assert None not in cohorts and cohorts[0] is not cohorts[1]
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()


@pytest.mark.parametrize("num_losses", [1, 2])
def test_who_is_paused_after_losses_is_a_suspect_again_if_it_was_one(num_losses: int) -> None:
    site = SickCluster("a")
    group = site.cluster.add([1] * 4, 30).group
    for _ in range(num_losses):
        assert site.cluster.start("a") is not None
        site.lose("a")
    is_suspect = group.cohort is not None
    assert is_suspect is (num_losses == 2)
    scheduler = site.cluster.scheduler
    scheduler.pause(group, keep_on_host=False)
    assert group.cohort is None
    scheduler.resume(group)
    assert (group.cohort is not None) is is_suspect
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()


def test_of_a_step_only_those_whose_answer_is_not_believed_are_suspects() -> None:
    site = SickCluster("a", depth=1)
    groups = add_mixed(site, 3)
    site.cluster.step("a")
    plan = site.cluster.start("a")
    assert plan is not None
    site.cluster.fail_steps("a")
    assert site.cluster.scheduler.record_failed_step([plan], suspects=groups[:1], is_disbelieved=True) == []
    assert [group.cohort is not None for group in groups] == [True, False, False]
    assert [group.num_preemptions for group in groups] == [1, 0, 0]  # what it has may be wrong
    site.run(kills=False)
    site.assert_only_the_poisoned_failed()


def test_who_ended_while_its_step_was_on_its_way_is_no_suspect_of_it() -> None:
    site = SickCluster("a", depth=1)
    groups = add_mixed(site, 3)
    assert site.cluster.start("a") is not None
    site.cluster.scheduler.finish_group(groups[0])
    assert site.cluster.blame_step("a") == []
    site.cluster.scheduler.check()
    assert [group.cohort is not None for group in groups] == [False, True, True]
    plan = site.cluster.start("a")
    assert plan is not None
    alone = plan.sequences[0].group
    site.cluster.scheduler.finish_group(alone)
    site.lose("a")
    site.cluster.scheduler.check()
    assert alone.cohort is None
    site.run(kills=False)
    assert site.failed == []
    site.cluster.assert_idle_and_unleaked()
