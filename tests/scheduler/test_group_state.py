"""States of groups: random calls make every transition of the table, and no other."""

import random

import pytest

from scheduler_svc.core.group_state import NEXT_STATES, GroupState
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import SequenceGroup
from tests.scheduler.core_cluster import Cluster, Transition

TABLE = {(state, to) for state, following in NEXT_STATES.items() for to in following}
WORKER_IDS = ("a", "b")
PROMPTS = [[prefix] * length for prefix in (1, 2, 3) for length in (1, 5, 9)]


class RandomCalls:
    """Calls that the engine may make, drawn with a seed. After each, every group is listed as its state says."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cluster = Cluster(
            SchedulerConfig(
                max_num_batched_tokens=self.rng.choice([2, 5, 16]),
                preemption=self.rng.choice(["swap", "swap", "recompute"]),
                watermark=0.0,
                block_fetch=self.rng.choice(["always", "never"]),
            )
        )
        self.scheduler = self.cluster.scheduler

    def run(self, num_calls: int) -> set[Transition]:
        often = [self.step] * 8 + [self.pause, self.end] * 2 + [self.add, self.resume]
        faults = [self.blame, self.forgive, self.lose_worker, self.replace_worker]
        calls = [
            *often,
            *faults,
            self.drain,
            self.drain,
            self.end_fetches,
            self.act_before_it_is_added,
            self.let_time_pass,
        ]
        for _ in range(num_calls):
            self.rng.choice(calls)()
            self.cluster.assert_groups_are_listed()
        return self.cluster.transitions

    def groups(self) -> list[SequenceGroup]:
        groups = dict.fromkeys(s.group for s in self.cluster.sequences if not s.is_finished)
        return [group for group in groups if group.state is not GroupState.NEW]

    def one_of_a_state(self) -> SequenceGroup | None:
        """A group, such that each state that occurs is as likely as another."""
        groups = {group.state: group for group in self.rng.sample(self.groups(), len(self.groups()))}
        return self.rng.choice(list(groups.values())) if groups else None

    def busy(self) -> list[str]:
        return [worker_id for worker_id, plans in self.cluster.plans.items() if plans]

    def add(self) -> None:
        deadline_s = self.rng.choice([None, None, self.cluster.now_s + 1.0])
        for _ in range(3):
            self.cluster.add_group(
                self.rng.choice(PROMPTS),
                self.rng.randint(1, 2),
                self.rng.randint(4, 12),
                priority=self.rng.randint(0, 1),
                deadline_s=deadline_s,
            )

    def act_before_it_is_added(self) -> None:
        group = self.cluster.new_group(self.rng.choice(PROMPTS), 1)
        if self.rng.random() < 0.5:
            self.scheduler.add(group, is_paused=True)
        else:
            self.scheduler.finish_group(group)

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            for worker_id in self.cluster.workers:
                if self.cluster.plans[worker_id] and self.rng.random() < 0.5:
                    self.cluster.complete(worker_id)
                else:
                    self.cluster.start(worker_id)

    def replace_worker(self) -> None:
        worker_id = self.rng.choice(WORKER_IDS)
        if worker_id in self.cluster.workers:
            self.cluster.remove_worker(worker_id)
        num_host_blocks = self.rng.choice([0, 20, 20])
        self.cluster.add_worker(
            worker_id, num_blocks=self.rng.randint(6, 10), num_host_blocks=num_host_blocks, block_format="f"
        )

    def end_fetches(self) -> None:
        for fetch in list(self.cluster.fetches):
            self.cluster.end_fetch(fetch, self.rng.randint(0, len(fetch.blocks)))

    def drain(self) -> None:
        for worker_id in self.cluster.workers:
            workers = self.scheduler.workers
            self.rng.choice([workers.drain_worker, workers.undo_drain, workers.undo_drain])(worker_id)

    def pause(self) -> None:
        group = self.one_of_a_state()
        if group is not None:
            self.scheduler.pause(group, keep_on_host=self.rng.random() < 0.7)

    def resume(self) -> None:
        for group in self.groups():
            self.scheduler.resume(group)

    def end(self) -> None:
        group = self.one_of_a_state()
        if group is not None:
            self.scheduler.finish_group(group)

    def blame(self) -> None:
        for worker_id in self.busy():
            self.cluster.blame_step(worker_id)

    def lose_worker(self) -> None:
        for worker_id in self.busy()[:1]:
            self.cluster.lose_worker(worker_id)
            self.scheduler.record_return(worker_id, is_same_process=self.rng.random() < 0.5)
            self.cluster.add_worker(worker_id, num_blocks=self.rng.randint(6, 10), num_host_blocks=20, block_format="f")

    def forgive(self) -> None:
        for worker_id in self.cluster.workers:
            self.scheduler.forgive_worker(worker_id)

    def let_time_pass(self) -> None:
        self.cluster.now_s += self.rng.choice([0.1, 2.0])


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


def is_swapped(group: SequenceGroup) -> bool:
    return group.state is GroupState.SWAPPED


def swap_out_while_a_step_is_in_flight(cluster: Cluster, group: SequenceGroup) -> None:
    while not is_swapped(group):
        if cluster.start() is None and not is_swapped(group):
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


def lose_the_worker_of_a_swapped_group() -> set[Transition]:
    cluster, group = swapped_with_a_step_in_flight()
    cluster.lose_worker()
    cluster.add_worker(num_blocks=8, num_host_blocks=9)  # until the earlier group has 17 tokens
    swap_out_while_a_step_is_in_flight(cluster, group)
    cluster.lose_worker()  # the second time at the same place
    assert group.state is GroupState.QUARANTINED
    return cluster.transitions


def fail_a_step_of_a_group_that_is_fetched_for() -> set[Transition]:
    """Blame a chunk of a prompt, which samples nothing, that is in flight when another worker begins to fetch."""
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=8, block_fetch="always"))
    for worker_id in "ab":
        cluster.add_worker(worker_id, num_blocks=40, block_format="f")
    group = cluster.add([1] * 40).group
    cluster.scheduler.workers.drain_worker("b")
    cluster.step("a")
    cluster.start("a")
    cluster.scheduler.workers.undo_drain("b")
    cluster.scheduler.workers.drain_worker("a")
    cluster.start("b")
    assert cluster.fetches[0].group is group
    cluster.blame_step("a")
    assert group.state is GroupState.QUARANTINED
    cluster.end_fetch(cluster.fetches[0])
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    return cluster.transitions


def test_random_calls_and_rare_courses_make_every_transition_of_the_table() -> None:
    """A transition that is not in the table raises in `move_to`."""
    seen = set.union(*(RandomCalls(seed).run(60) for seed in range(300)))
    rare = blame_a_step_when_the_deadline_has_passed() | lose_the_worker_of_a_swapped_group()
    rare |= fail_a_step_of_a_group_that_is_fetched_for()
    missing = TABLE - seen - rare
    assert not missing, f"in the table, and never made: {[(state.name, to.name) for state, to in missing]}"


def test_a_transition_that_is_not_in_the_table_is_refused() -> None:
    group = Cluster(SchedulerConfig()).new_group([1, 2, 3], 1)
    with pytest.raises(AssertionError, match="group 0 moves from NEW to SWAPPED"):
        group.move_to(GroupState.SWAPPED)
    assert group.state is GroupState.NEW
