"""Blocks that pass from one worker to another: who is fetched for, what is found afterwards, what a loss costs.

Blocks hold 4 tokens. The workers check every key and value that they read.
"""

import random
from typing import Any

import pytest

from scheduler_svc.core import load_sharing
from scheduler_svc.core.block_hash import extend_block_hashes
from scheduler_svc.core.fetch_costs import MAX_TRIAL_FETCHES, MIN_TRIAL_BLOCKS, FetchMode, prefers_fetch
from scheduler_svc.core.fetching import Fetch
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.phases import WorkerRole
from scheduler_svc.core.placing import num_placing_steps
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.waiting_reasons import WaitingReason
from tests.scheduler.core_cluster import Cluster

PROMPT = [(3 * i) % 16 + 1 for i in range(40)]  # 10 blocks


def make_cluster(mode: FetchMode = "always", num_blocks: int = 100, **workers: Any) -> Cluster:
    """`workers`: options of each; all store blocks alike, unless they say otherwise."""
    cluster = Cluster(
        SchedulerConfig(max_num_batched_tokens=64, pipeline_depth=2, watermark=0.0, block_fetch=mode, max_num_seqs=8)
    )
    for worker_id, options in workers.items():
        cluster.add_worker(worker_id, **{"num_blocks": num_blocks, "block_format": "f", **options})
    return cluster


def run(cluster: Cluster, worker_id: str, num_steps: int) -> None:
    for _ in range(num_steps):
        cluster.start(worker_id)
        cluster.complete(worker_id)


def move(cluster: Cluster, group: SequenceGroup, source: str = "a", destination: str = "b") -> Fetch:
    """Drain the source, and have the destination begin to fetch what runs there."""
    cluster.scheduler.workers.drain_worker(source)
    while cluster.in_flight[source]:
        cluster.complete(source)
    cluster.start(destination)
    (fetch,) = cluster.fetches
    assert fetch.group is group and group.state is GroupState.FETCHING
    return fetch


def running_on_a(
    cluster: Cluster,
    num_sequences: int = 1,
    max_tokens: int = 12,
    *,
    max_placed_blocks: int | None = None,
    **options: Any,
) -> SequenceGroup:
    """A group that has its prompt and 6 tokens of output, on worker a; worker b comes then."""
    group = cluster.add_group(PROMPT, num_sequences, max_tokens, **options)
    run(cluster, "a", 6)
    assert group.state is GroupState.RUNNING
    cluster.add_worker("b", num_blocks=100, block_format="f", max_placed_blocks=max_placed_blocks)
    return group


def test_a_running_group_moves_to_another_worker_and_computes_nothing_again() -> None:
    cluster = make_cluster(a={})
    group = running_on_a(cluster)
    fetch = move(cluster, group)
    assert len(fetch.blocks) == 12  # 45 computed tokens
    assert cluster.scheduler.waiting_reason(group) is WaitingReason.FETCH
    assert cluster.end_fetch(fetch) == 12 and group.state is GroupState.WAITING
    cluster.finish_and_compare()
    assert cluster.workers["b"].num_computed_tokens == 52 - 1 - 45  # the last token is never computed
    assert cluster.stats("b").num_fetched_blocks == group.num_fetched_blocks == 12
    assert cluster.stats("b").num_fetches == 1 and cluster.scheduler.stats().work.num_fetched_blocks == 12


@pytest.mark.parametrize("is_beam", [False, True])
def test_the_members_of_a_group_move_together_and_a_shared_block_travels_once(is_beam: bool) -> None:
    cluster = make_cluster(a={})
    group = running_on_a(cluster, 3, 14, is_beam=is_beam)
    fetch = move(cluster, group)
    assert len(set(fetch.blocks)) == len(fetch.blocks) and 11 <= len(fetch.blocks) <= 16
    cluster.end_fetch(fetch)
    cluster.finish_and_compare()
    assert cluster.workers["b"].num_computed_tokens == 3 * (40 + 14 - 1 - 45)


def test_a_prefix_that_another_worker_has_is_fetched_and_the_head_of_it_that_is_here_is_not() -> None:
    cluster = make_cluster(a={"num_blocks": 16}, b={})
    cluster.scheduler.workers.drain_worker("b")
    cluster.add(PROMPT, 2)
    cluster.run_until_idle()  # a has the whole prompt
    cluster.scheduler.workers.undo_drain("b")
    cluster.scheduler.workers.drain_worker("a")
    cluster.add([*PROMPT[:12], 5, 5, 5, 5], 2)
    cluster.run_until_idle()  # b has three blocks of it, fetched, and one of its own
    assert cluster.stats("b").num_fetched_blocks == 3
    follower = cluster.add([*PROMPT, 7, 7], 2)
    cluster.start("b")
    (fetch,) = cluster.fetches
    assert fetch.hashes == follower.block_hashes[3:10]
    cluster.end_fetch(fetch)
    before = cluster.workers["b"].num_computed_tokens
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    assert cluster.workers["b"].num_computed_tokens - before == 2 + 1 and follower.num_cached_tokens == 40


def test_what_is_computed_at_the_destination_meanwhile_is_not_placed_again() -> None:
    cluster = make_cluster(a={})
    group = running_on_a(cluster)
    fetch = move(cluster, group)
    twin = cluster.add(PROMPT, 2)
    twin.group.fetch_id = 99  # as if it had been fetched for
    cluster.start("b")
    cluster.end_fetch(fetch)
    assert group.num_fetched_blocks == cluster.stats("b").num_fetched_blocks == 2  # those behind the prompt
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_others_are_served_while_a_fetch_is_under_way() -> None:
    cluster = make_cluster(a={})
    group = running_on_a(cluster)
    move(cluster, group)
    other = cluster.add([9, 9, 9], 3)
    run(cluster, "b", 3)
    assert other.is_finished and group.state is GroupState.FETCHING


@pytest.mark.parametrize("num_blocks", [0, 1, 7, 11, 12])
def test_what_has_come_of_a_broken_fetch_is_used_and_it_is_not_tried_again(num_blocks: int) -> None:
    cluster = make_cluster(a={})
    group = running_on_a(cluster)
    assert cluster.end_fetch(move(cluster, group), num_blocks) == num_blocks
    cluster.run_until_idle()
    assert not cluster.fetches and cluster.stats("b").num_fetches == 1
    assert cluster.workers["b"].num_computed_tokens == 51 - min(4 * num_blocks, 45)
    cluster.assert_outputs_are_unconstrained()


@pytest.mark.parametrize("lost", ["a", "b"])
def test_the_loss_of_either_worker_costs_the_fetch_alone(lost: str) -> None:
    cluster = make_cluster(a={})
    group = running_on_a(cluster)
    fetch = move(cluster, group)
    cluster.lose_worker(lost)
    cluster.add_worker(lost, num_blocks=100, block_format="f")  # another process
    cluster.scheduler.check()
    assert cluster.end_fetch(fetch) == 0 and group.state is GroupState.WAITING
    cluster.finish_and_compare()


def test_a_fetch_that_ends_when_its_workers_are_gone_names_no_block_by_their_block_size() -> None:
    cluster = make_cluster(a={})
    group = running_on_a(cluster)
    fetch = move(cluster, group)
    for worker_id in ("a", "b"):
        cluster.remove_worker(worker_id)
    cluster.add_worker("c", num_blocks=100, block_size=8)
    cluster.end_fetch(fetch)
    cluster.run_until_idle()
    (sequence,) = group.sequences
    expected: list[bytes] = []
    extend_block_hashes(expected, b"", sequence.token_ids, 8, len(sequence.block_hashes))
    assert expected and sequence.block_hashes == expected


def test_the_blocks_stay_at_the_source_until_the_fetch_has_ended() -> None:
    cluster = make_cluster(a={"num_blocks": 14})
    group = running_on_a(cluster)
    fetch = move(cluster, group)
    assert cluster.scheduler.workers.num_sequences_on("a") == 1  # so a worker that drains does not end yet
    cluster.scheduler.workers.undo_drain("a")
    other = cluster.add([9] * 24, 4)
    cluster.scheduler.workers.drain_worker("b")
    assert cluster.start("a") is None  # 3 blocks are left
    cluster.end_fetch(fetch)
    assert cluster.scheduler.workers.num_sequences_on("a") == 0
    cluster.scheduler.workers.undo_drain("b")
    cluster.run_until_idle()
    assert other.is_finished
    cluster.assert_outputs_are_unconstrained()


@pytest.mark.parametrize("act", ["finish", "pause"])
def test_a_group_may_end_or_pause_while_its_blocks_are_on_their_way(act: str) -> None:
    cluster = make_cluster(a={})
    group = running_on_a(cluster)
    fetch = move(cluster, group)
    if act == "finish":
        cluster.scheduler.finish_group(group)
    else:
        cluster.scheduler.pause(group, keep_on_host=True)
        cluster.scheduler.resume(group)
    cluster.scheduler.check()
    assert cluster.end_fetch(fetch) == 0
    cluster.finish_and_compare()


@pytest.mark.parametrize("is_sent", [False, True])
def test_blocks_that_the_destination_has_lost_are_computed(is_sent: bool) -> None:
    """Lose them before the step that places them is planned, or when it is in flight."""
    cluster = make_cluster(a={})
    group = running_on_a(cluster)
    fetch = move(cluster, group)
    cluster.end_fetch(fetch)
    if is_sent:
        plan = cluster.start("b")
        assert plan is not None and len(plan.placed) == 3 * 12
    cluster.drop_fetch(fetch)
    cluster.scheduler.check()
    cluster.finish_and_compare()
    is_fetched_again = is_sent  # it had been started
    assert cluster.workers["b"].num_computed_tokens == (6 if is_fetched_again else 51)
    assert cluster.stats("b").num_fetches == 1 + is_fetched_again


def test_a_step_that_placed_blocks_and_failed_leaves_none_of_them_in_the_cache() -> None:
    cluster = make_cluster(a={})
    group = running_on_a(cluster)
    cluster.end_fetch(move(cluster, group))
    assert cluster.start("b") is not None
    cluster.fail_steps("b")
    cluster.scheduler.check()
    (sequence,) = group.live
    assert not cluster.scheduler.workers.pin_blocks("b", "x", sequence.block_hashes[:1])
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    assert cluster.stats("b").num_fetches == 2


def test_blocks_of_steps_in_flight_are_neither_fetched_nor_pinned() -> None:
    cluster = make_cluster(a={})
    group = running_on_a(cluster)
    cluster.end_fetch(move(cluster, group))
    (sequence,) = group.live
    assert not cluster.scheduler.workers.pin_blocks("b", "x", sequence.block_hashes[:3])
    cluster.start("b")
    assert not cluster.scheduler.workers.pin_blocks("b", "x", sequence.block_hashes[:3])
    cluster.complete("b")
    assert cluster.scheduler.workers.pin_blocks("b", "x", sequence.block_hashes[:3])


@pytest.mark.parametrize(
    ("options", "group_options"),
    [
        ({"block_format": "g"}, {}),
        ({"block_format": ""}, {}),
        ({"max_fetched_blocks": 0}, {}),
        ({}, {"use_prefix_cache": False}),
    ],
)
def test_nothing_is_fetched_where_it_could_not_be_used(options: dict[str, Any], group_options: dict[str, Any]) -> None:
    cluster = make_cluster(a={}, c=options)
    cluster.scheduler.workers.drain_worker("c")
    cluster.add_group(PROMPT, 1, 12, **group_options)
    run(cluster, "a", 6)
    cluster.scheduler.workers.undo_drain("c")
    cluster.scheduler.workers.drain_worker("a")
    cluster.run_until_idle()
    assert cluster.stats("c").num_fetches == 0
    cluster.assert_outputs_are_unconstrained()


def test_no_more_is_fetched_at_once_than_the_destination_keeps() -> None:
    cluster = make_cluster(a={}, b={"max_fetched_blocks": 12})
    cluster.scheduler.workers.drain_worker("b")
    for number in range(3):
        cluster.add([number + 1] * 33, 8)
    run(cluster, "a", 4)
    cluster.scheduler.workers.undo_drain("b")
    cluster.scheduler.workers.drain_worker("a")
    cluster.start("b")
    assert [len(fetch.blocks) for fetch in cluster.fetches] == [9, 3]
    cluster.scheduler.check()
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


@pytest.mark.parametrize(
    ("mode", "prefill", "speed", "num_fetches", "num_blocks", "is_fetched"),
    [
        ("never", 1.0, 1e9, 0, 100, False),
        ("always", None, None, 0, 1, True),
        ("auto", None, 1e9, 0, 100, False),  # the speed of computing is unknown
        ("auto", 100.0, None, 0, MIN_TRIAL_BLOCKS, True),  # to measure
        ("auto", 100.0, None, 0, MIN_TRIAL_BLOCKS - 1, False),
        ("auto", 100.0, None, MAX_TRIAL_FETCHES, 100, False),
        ("auto", 100.0, 26.0, 9, 10, True),  # 10 / 26 s against 40 tokens / 100 s
        ("auto", 100.0, 25.0, 9, 10, False),
    ],
)
def test_a_fetch_is_chosen_by_measured_speeds(
    mode: FetchMode, prefill: float | None, speed: float | None, num_fetches: int, num_blocks: int, is_fetched: bool
) -> None:
    assert prefers_fetch(mode, prefill, speed, num_fetches, num_blocks, 4 * num_blocks) is is_fetched


def test_the_steps_that_place_what_has_come_count() -> None:
    """40 tokens at 100 a second are 0.4 s; 10 blocks at 50 a second are 0.2 s, which leaves 0.2 s for the steps."""
    assert [prefers_fetch("auto", 100.0, 50.0, 9, 10, 40, placing_s) for placing_s in (0.0, 0.19, 0.2)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("max_placed_blocks", [None, 4])
def test_the_steps_of_rows_that_run_at_the_destination_are_estimated(max_placed_blocks: int | None) -> None:
    cluster = make_cluster("auto", a={}, b={"max_placed_blocks": max_placed_blocks})
    fetches, states = cluster.scheduler.fetches, cluster.scheduler.workers._workers
    source, destination = states["a"], states["b"]
    costs = PreemptionCosts(prefill_tokens_per_s=100.0, fetch_blocks_per_s=50.0, decode_step_s=0.11)
    cluster.scheduler.workers.record_costs("b", costs)
    assert fetches.pays(destination, source, 10)  # nothing runs there
    cluster.scheduler.workers.drain_worker("a")
    cluster.add([5, 6, 7], 12)
    run(cluster, "b", 3)
    assert destination.running
    assert num_placing_steps(destination, 10) == (1 if max_placed_blocks is None else 3)
    assert fetches.pays(destination, source, 10) is (max_placed_blocks is None)  # 0.2 s + 2 × 0.11 s, against 0.4 s
    assert fetches.pays(destination, source, 8)  # one step less


def test_a_worker_that_has_just_come_is_judged_by_the_speed_of_the_source() -> None:
    cluster = make_cluster("auto", a={})
    cluster.scheduler.workers.record_costs("a", PreemptionCosts(prefill_tokens_per_s=100.0))
    group = running_on_a(cluster)
    cluster.end_fetch(move(cluster, group))
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


class RandomMoves:
    """Groups with common beginnings, on workers that drain, come and go, and fetches that break, drawn with a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.roles: list[WorkerRole] = ["mixed"] if rng.random() < 0.5 else ["prefill", "decode", "decode", "mixed"]
        self.cluster = Cluster(
            SchedulerConfig(
                max_num_batched_tokens=rng.choice([4, 16, 64]),
                pipeline_depth=rng.choice([1, 2, 3]),
                watermark=0.0,
                preemption=rng.choice(["swap", "recompute"]),
                block_fetch="always",
                max_num_seqs=8,
            ),
            most_forced=rng.choice([0, 0, 2]),
        )
        self.num_tails = 0  # that have been placed
        for worker_id in "ab":
            self.add_worker(worker_id)

    def add_worker(self, worker_id: str) -> None:
        self.cluster.add_worker(
            worker_id,
            num_blocks=self.rng.randint(16, 30),
            num_host_blocks=self.rng.choice([0, 20]),
            block_format="f",
            max_fetched_blocks=self.rng.choice([3, 1000]),
            max_placed_blocks=self.rng.choice([None, 1, 2]),
            role=self.rng.choice(self.roles),
        )

    def run(self, num_calls: int) -> None:
        calls = [self.go_on] * 8 + [self.drain, self.end_fetch, self.end_fetch] * 2
        calls += [self.add, self.add, self.drop_fetch, self.lose, self.refuse, self.pause, self.finish]
        for _ in range(num_calls):
            self.rng.choice(calls)()
            self.cluster.assert_groups_are_listed()
            self.cluster.assert_figures_add_up()
        for worker_id in "ab":
            self.cluster.scheduler.workers.undo_drain(worker_id)
        for sequence in self.unfinished():
            self.cluster.scheduler.resume(sequence.group)
        self.cluster.run_until_idle(20_000)
        self.cluster.assert_outputs_are_unconstrained()
        self.cluster.assert_idle_and_unleaked()

    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.cluster.sequences if not sequence.is_finished]

    def add(self) -> None:
        if len(self.unfinished()) < 12:
            prompt = [*PROMPT[: self.rng.randrange(30)], self.rng.randrange(1, 4)]
            is_beam = self.rng.random() < 0.2
            self.cluster.add_group(prompt, self.rng.choice([1, 1, 2]), self.rng.randint(1, 12), is_beam=is_beam)

    def go_on(self) -> None:
        for _ in range(3):
            worker_id = self.rng.choice("ab")
            if self.cluster.in_flight[worker_id] and self.rng.random() < 0.5:
                self.cluster.complete(worker_id)
            else:
                self.cluster.start(worker_id)

    def drain(self) -> None:
        drained, other = self.rng.sample("ab", 2)
        self.cluster.scheduler.workers.undo_drain(other)
        self.cluster.scheduler.workers.drain_worker(drained)

    def end_fetch(self) -> None:
        if self.cluster.fetches:
            fetch = self.rng.choice(self.cluster.fetches)
            num_blocks = self.rng.choice([len(fetch.blocks), len(fetch.blocks), self.rng.randint(0, len(fetch.blocks))])
            tails = {sequence.tail.block_hash for sequence in fetch.group.live if sequence.tail is not None}
            if self.cluster.end_fetch(fetch, num_blocks) == num_blocks:
                self.num_tails += len(tails.intersection(fetch.hashes[:num_blocks]))

    def drop_fetch(self) -> None:
        if self.cluster.placing:
            self.cluster.drop_fetch(self.rng.choice(self.cluster.placing))

    def lose(self) -> None:
        if self.rng.random() < 0.3:
            worker_id = self.rng.choice("ab")
            self.cluster.lose_worker(worker_id)
            self.add_worker(worker_id)

    def refuse(self) -> None:
        self.rng.choice([self.cluster.refuse_steps, self.cluster.fail_steps])(self.rng.choice("ab"))

    def pause(self) -> None:
        if self.unfinished():
            group = self.rng.choice(self.unfinished()).group
            if group.is_paused:
                self.cluster.scheduler.resume(group)
            else:
                self.cluster.scheduler.pause(group, keep_on_host=self.rng.random() < 0.5)

    def finish(self) -> None:
        if self.unfinished() and self.rng.random() < 0.3:
            self.cluster.scheduler.finish_group(self.rng.choice(self.unfinished()).group)


@pytest.mark.long
@pytest.mark.parametrize("shares_load", [False, True])
def test_whatever_happens_to_fetches_every_output_is_right_and_nothing_leaks(
    shares_load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shares_load:  # at the least occasion
        monkeypatch.setattr(load_sharing, "MIN_DIFFERENCE", 2)
        monkeypatch.setattr(load_sharing, "MIN_TOKENS_TO_GO", 2)
    num_fetched = num_fetches = num_tails = 0
    for seed in range(150):
        moves = RandomMoves(seed)
        moves.run(60)
        stats = moves.cluster.scheduler.stats()
        num_fetched += stats.work.num_fetched_blocks
        num_fetches += stats.work.num_fetches
        num_tails += moves.num_tails
    assert num_fetched > 300 and num_fetches > 150 and num_tails > 25
