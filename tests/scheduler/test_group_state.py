"""States of groups: random calls make every transition of the table, and no other."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from scheduler_svc.core.group_state import NEXT_STATES, GroupState
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step_plan import StepPlan
from tests.scheduler.core_cluster import Cluster, Transition
from tests.scheduler.test_scheduler_properties import SchedulerMachine

TABLE = {(state, to) for state, following in NEXT_STATES.items() for to in following}
SEEN: set[Transition] = set()


class TransitionMachine(SchedulerMachine):
    """The machine of the scheduler's properties, with calls for groups in rare states."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[StepPlan] = []

    def groups(self) -> dict[GroupState, list[SequenceGroup]]:
        """Unfinished groups by state."""
        by_state: dict[GroupState, list[SequenceGroup]] = {}
        for group in dict.fromkeys(sequence.group for sequence in self.unfinished()):
            by_state.setdefault(group.state, []).append(group)
        return by_state

    @precondition(lambda self: self.groups())
    @rule(data=st.data(), is_pause=st.booleans(), keep_on_host=st.booleans())
    def pause_or_end_one_of_a_state(self, data: Any, is_pause: bool, keep_on_host: bool) -> None:
        groups = self.groups()
        group = groups[data.draw(st.sampled_from(sorted(groups, key=lambda state: state.value)))][0]
        if is_pause:
            self.cluster.scheduler.pause(group, keep_on_host=keep_on_host)
        else:
            self.cluster.scheduler.finish_group(group)

    @rule(num_sequences=st.integers(1, 3), is_added=st.booleans())
    def add_paused_or_end_before_it_is_added(self, num_sequences: int, is_added: bool) -> None:
        group = self.cluster.new_group([1, 2, 3], min(num_sequences, self.cluster.config.max_num_seqs))
        if is_added:
            self.cluster.scheduler.add(group, is_paused=True)
        else:
            self.cluster.scheduler.finish_group(group)

    @rule()
    def let_much_time_pass(self) -> None:
        self.cluster.now_s += 2.0

    @precondition(lambda self: self.busy())
    @rule(data=st.data())
    def fail_steps_that_are_blamed_later(self, data: Any) -> None:
        worker_id = data.draw(st.sampled_from(self.busy()))
        self.failed = list(self.cluster.plans[worker_id])
        self.cluster.fail_steps(worker_id)

    @precondition(lambda self: self.failed)
    @rule()
    def blame_failed_steps(self) -> None:
        plans = [plan for plan in self.failed if plan.worker_id in self.cluster.workers]
        self.failed = []
        self.cluster.end_guilty(self.cluster.scheduler.record_failed_step(plans))

    @precondition(lambda self: self.cluster.workers)
    @rule(data=st.data())
    def forgive_worker(self, data: Any) -> None:
        self.cluster.scheduler.forgive_worker(data.draw(st.sampled_from(sorted(self.cluster.workers))))

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            for sequence in self.unfinished():
                if sequence.group.deadline_s is not None:
                    self.cluster.scheduler.finish_group(sequence.group)
        super().teardown()
        if hasattr(self, "cluster"):
            SEEN.update(self.cluster.transitions)


def quarantined_by_its_first_step(num_groups: int) -> tuple[Cluster, list[SequenceGroup]]:
    """A failed step takes back the start of its groups: they wait, and are suspects."""
    cluster = Cluster(SchedulerConfig())
    cluster.add_worker(num_blocks=40)
    groups = [cluster.add([1, 2, 3]).group for _ in range(num_groups)]
    cluster.start()
    cluster.blame_step()
    assert all(group.state is GroupState.QUARANTINED for group in groups)
    return cluster, groups


def clear_a_suspect() -> set[Transition]:
    cluster, _ = quarantined_by_its_first_step(2)
    cluster.scheduler.forgive_worker("w")
    return cluster.transitions


def pause_a_suspect() -> set[Transition]:
    cluster, (group, _) = quarantined_by_its_first_step(2)
    cluster.scheduler.pause(group, keep_on_host=False)
    return cluster.transitions


def lose_the_worker_of_a_suspect() -> set[Transition]:
    cluster = Cluster(SchedulerConfig(pipeline_depth=1))
    cluster.add_worker(num_blocks=40)
    for _ in range(2):
        cluster.add([1, 2, 3], 9)
    cluster.step()
    cluster.start()
    cluster.blame_step()
    cluster.remove_worker("w")
    return cluster.transitions


def blame_a_step_when_the_deadline_has_passed() -> set[Transition]:
    cluster = Cluster(SchedulerConfig())
    cluster.add_worker("a", num_blocks=40)
    cluster.add([1, 2, 3], deadline_s=5.0)
    plan = cluster.start("a")
    assert plan is not None
    cluster.fail_steps("a")
    cluster.now_s = 9.0
    assert cluster.start("a") is None
    cluster.scheduler.record_failed_step([plan])
    return cluster.transitions


def swap_out_while_a_step_is_in_flight(cluster: Cluster, group: SequenceGroup) -> None:
    while group.state is not GroupState.SWAPPED:
        if cluster.start() is None and group.state is not GroupState.SWAPPED:
            cluster.complete()
    assert any(group is sequence.group for plan in cluster.plans["w"] for sequence in plan.sequences)


def swapped_with_a_step_in_flight() -> tuple[Cluster, SequenceGroup]:
    """The earlier group needs a block while the other computes its prompt, a token a step."""
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=2, preemption="swap", watermark=0.0))
    cluster.add_worker(num_blocks=7, num_host_blocks=9)
    cluster.add([1] * 8, 12)  # 3 blocks of 4, until it has 13 tokens
    group = cluster.add([2] * 14, 2).group  # 4 blocks
    swap_out_while_a_step_is_in_flight(cluster, group)
    return cluster, group


def pause_a_swapped_group() -> set[Transition]:
    cluster, group = swapped_with_a_step_in_flight()
    cluster.scheduler.pause(group, keep_on_host=True)
    return cluster.transitions


def lose_the_worker_of_a_swapped_group() -> set[Transition]:
    cluster, group = swapped_with_a_step_in_flight()
    cluster.lose_worker()
    cluster.add_worker(num_blocks=8, num_host_blocks=9)  # until the earlier group has 17 tokens
    swap_out_while_a_step_is_in_flight(cluster, group)
    cluster.lose_worker()  # the second time at the same place
    assert group.state is GroupState.QUARANTINED
    return cluster.transitions


RARE = {
    clear_a_suspect: (GroupState.QUARANTINED, GroupState.WAITING),
    pause_a_suspect: (GroupState.QUARANTINED, GroupState.PAUSED),
    lose_the_worker_of_a_suspect: (GroupState.RUNNING, GroupState.QUARANTINED),
    blame_a_step_when_the_deadline_has_passed: (GroupState.DEFERRED, GroupState.QUARANTINED),
    pause_a_swapped_group: (GroupState.SWAPPED, GroupState.PAUSED),
    lose_the_worker_of_a_swapped_group: (GroupState.SWAPPED, GroupState.QUARANTINED),
}


@pytest.mark.parametrize("scenario", RARE, ids=lambda scenario: scenario.__name__)
def test_a_rare_transition(scenario: Callable[[], set[Transition]]) -> None:
    assert RARE[scenario] in scenario()


def test_random_calls_make_every_other_transition_of_the_table() -> None:
    """A transition that is not in the table raises in `move_to`."""
    SEEN.clear()
    run_state_machine_as_test(
        TransitionMachine,
        settings=settings(
            max_examples=120,
            stateful_step_count=40,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    missing = TABLE - SEEN - set(RARE.values())
    assert not missing, f"in the table, and never made: {[(a.name, b.name) for a, b in missing]}"


def test_a_transition_that_is_not_in_the_table_is_refused() -> None:
    group = Cluster(SchedulerConfig()).new_group([1, 2, 3], 1)
    with pytest.raises(AssertionError, match="group 0 moves from NEW to SWAPPED"):
        group.move_to(GroupState.SWAPPED)
    assert group.state is GroupState.NEW
