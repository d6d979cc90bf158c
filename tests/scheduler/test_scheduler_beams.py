"""Beam groups: blocks follow the hypotheses, the host chooses each token. Blocks hold 4 tokens."""

import random

import pytest

from scheduler_svc.core.beam_groups import idle_unused_beams, replace_beams
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from tests.scheduler.core_cluster import Cluster, make_cluster
from tests.scheduler.core_executor import unconstrained_beams
from tests.scheduler.worker_states import execute, launch_rows, make_group, make_new_group, make_worker, start

PROMPT = [11, 12, 13, 14, 15, 16]  # a block and a half


def add_beams(cluster: Cluster, beam_width: int, max_tokens: int = 8, prompt: list[int] = PROMPT) -> SequenceGroup:
    return cluster.add_group(prompt, beam_width, max_tokens, is_beam=True)


def search_by_hand(cluster: Cluster, group: SequenceGroup, survivors: list[tuple[Sequence, int]]) -> list[Sequence]:
    """A step of the group's rows, its tokens as the test says."""
    plan = cluster.scheduler.schedule("w")
    assert plan is not None and plan.candidate_rows
    cluster.scheduler.apply("w", plan.step_id, [])
    assert group.awaits_decision
    placed = cluster.scheduler.replace_beams(group, survivors)
    cluster.scheduler.check()
    return placed


def test_the_prompt_is_one_row_of_candidates_and_no_sample() -> None:
    cluster = make_cluster()
    group = add_beams(cluster, 3)
    plan = cluster.scheduler.schedule("w")
    assert plan is not None
    assert plan.sequences == plan.whole == group.sequences[:1]
    assert (plan.candidate_rows, plan.sampled_rows, plan.sampled_sequences) == ([0], [], [])
    assert not group.awaits_decision  # it is in flight
    assert [s.status.name for s in group.sequences] == ["RUNNING", "IDLE", "IDLE"]
    assert cluster.scheduler.apply("w", 1, []) == []
    assert group.awaits_decision
    assert cluster.scheduler.schedule("w") is None


def test_children_share_the_blocks_of_their_parent_and_copy_one_at_most() -> None:
    cluster = make_cluster()
    group = add_beams(cluster, 3)
    a, b, c = group.sequences
    assert search_by_hand(cluster, group, [(a, 1), (a, 2), (a, 3)]) == [a, b, c]
    assert [s.token_ids[6:] for s in (a, b, c)] == [[1], [2], [3]]
    assert cluster.stats().num_used_blocks == 2
    tail = a.block_table[1]
    plan = cluster.scheduler.schedule("w")
    assert plan is not None
    assert plan.whole == plan.sequences == [a, b, c]
    assert plan.copies == [tail, b.block_table[1], tail, c.block_table[1]]
    assert plan.append_pairs == []  # they are described whole
    assert cluster.stats().num_used_blocks == 4


def test_the_first_child_goes_on_in_place_and_a_beam_without_child_gives_back_its_blocks_at_once() -> None:
    cluster = make_cluster()
    group = add_beams(cluster, 3)
    a, b, c = group.sequences
    search_by_hand(cluster, group, [(a, 1), (a, 2), (a, 3)])
    # The best goes on from b twice, and from c; a has no child.
    assert search_by_hand(cluster, group, [(b, 7), (c, 8), (b, 9)]) == [b, c, a]
    assert [s.output_token_ids for s in (b, c, a)] == [[2, 7], [3, 8], [2, 9]]
    assert a.block_table == b.block_table[:1] and a.fork_tail == b.block_table[1]
    assert cluster.stats().num_used_blocks == 3  # the shared first block, the second of b and that of c
    # Only c has a child, in one place: the others are idle and hold nothing but their seats.
    assert search_by_hand(cluster, group, [(c, 5)]) == [c]
    assert [s.status.name for s in (a, b, c)] == ["IDLE", "IDLE", "RUNNING"]
    assert cluster.stats().num_used_blocks == 2
    assert all(s.seat is not None for s in group.sequences)
    plan = cluster.scheduler.schedule("w")
    assert plan is not None and plan.sequences == [c]
    assert sorted(plan.freed_seats) == sorted(s.seat for s in (a, b) if s.seat is not None)


def test_a_fork_from_a_full_last_block_copies_nothing() -> None:
    cluster = make_cluster()
    group = add_beams(cluster, 2, prompt=PROMPT[:4])
    a, b = group.sequences
    search_by_hand(cluster, group, [(a, 1), (a, 2)])
    plan = cluster.scheduler.schedule("w")
    assert plan is not None and plan.copies == []
    assert a.block_table[0] == b.block_table[0] and a.block_table[1] != b.block_table[1]


def test_a_beam_group_holds_a_seat_for_each_beam_from_its_admission_on() -> None:
    cluster = make_cluster(num_seats=4)
    other = cluster.add([1, 2], 3)
    cluster.step()
    group = add_beams(cluster, 4)
    assert cluster.step().sequences == [other]
    cluster.step()
    assert cluster.step().sequences == group.sequences[:1]
    late = cluster.add([3], 2)
    assert late not in cluster.step().sequences
    cluster.finish_and_compare()


def test_a_decision_is_refused_where_none_is_awaited_and_where_it_cannot_be_placed() -> None:
    cluster = make_cluster()
    group, stranger = add_beams(cluster, 2), cluster.add([1], 3)
    a, b = group.sequences
    with pytest.raises(ValueError, match="awaits no decision"):
        cluster.scheduler.replace_beams(group, [(a, 1)])
    plan = cluster.scheduler.schedule("w")
    assert plan is not None
    cluster.scheduler.apply("w", plan.step_id, [1])
    for survivors in ([], [(a, 1), (a, 2), (a, 3)]):
        with pytest.raises(ValueError, match="beams survive: give 1 to 2"):
            cluster.scheduler.replace_beams(group, survivors)
    for parent in (b, stranger):
        with pytest.raises(ValueError, match="no live beam"):
            cluster.scheduler.replace_beams(group, [(parent, 1)])
    with pytest.raises(ValueError, match="are the same: give each beam and token once"):
        cluster.scheduler.replace_beams(group, [(a, 1), (a, 1)])
    assert cluster.scheduler.replace_beams(group, [(a, 1)]) == [a]
    with pytest.raises(ValueError, match="awaits no decision"):
        cluster.scheduler.replace_beams(group, [(a, 1)])


def test_beams_take_every_second_step_while_others_pipeline() -> None:
    cluster = make_cluster(depth=2)
    a, b = add_beams(cluster, 2).sequences
    other = cluster.add([1, 2, 3], 20)
    rows = []
    for _ in range(9):
        plan = cluster.start()
        assert plan is not None
        rows.append(plan.sequences)
        if len(cluster.in_flight["w"]) == 2:
            cluster.complete()
    assert rows[0] == [a, other]
    assert rows[1:] == [[other], [a, b, other]] * 4
    cluster.finish_and_compare()


@pytest.mark.parametrize("budget", [1, 3])
def test_beams_that_do_not_fit_into_one_step_are_decided_when_all_have_been_computed(budget: int) -> None:
    cluster = make_cluster(budget=budget, depth=2)
    group = add_beams(cluster, 4)
    cluster.finish_and_compare()
    assert len(cluster.ranks[group]) == 4


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_beams_preempted_in_flight_lose_their_candidates_and_get_them_again(enable_prefix_cache: bool) -> None:
    # Step 3 has rows of the beams, and is in flight when they are preempted before step 4.
    cluster = make_cluster(depth=2, enable_prefix_cache=enable_prefix_cache, preempt_every=4)
    cluster.add([1, 2, 3], 30)
    group = add_beams(cluster, 3, 12)
    while group.sequences[0].status is not SequenceStatus.PREEMPTED:
        if cluster.start() is None:
            cluster.complete()
    assert group.num_pending_tokens > 0 and group.sequences[0].num_output_tokens > 0
    num_tokens = group.num_distinct_tokens - group.num_pending_tokens
    cluster.scheduler.check()
    while cluster.in_flight["w"]:
        cluster.complete()
    assert not group.awaits_decision
    assert group.num_distinct_tokens == num_tokens
    cluster.finish_and_compare()


def test_restored_beams_share_the_branches_that_they_have_in_common() -> None:
    cluster = make_cluster()
    group = add_beams(cluster, 3, 30, prompt=[1, 2, 3, 4])
    a, b, c = group.sequences
    assert search_by_hand(cluster, group, [(a, 1), (a, 3)]) == [a, b]
    for token in range(5, 9):
        search_by_hand(cluster, group, [(a, token), (b, token)])
    assert search_by_hand(cluster, group, [(a, 9), (a, 10), (b, 11)]) == [a, c, b]
    cluster.remove_all_memory("w", num_blocks=40)
    plan = cluster.scheduler.schedule("w")
    assert plan is not None
    # 10 tokens each; a and c have 9 in common, two full blocks; b shares the prompt alone.
    assert (plan.sequences, plan.positions, plan.num_tokens) == ([a, b, c], [0, 4, 8], [10, 6, 2])
    assert a.block_table[:2] == c.block_table[:2] and b.block_table[:1] == a.block_table[:1]
    assert plan.candidate_rows == [0, 1, 2]
    assert cluster.stats().num_used_blocks == 3 + 1 + 2


def test_a_rollback_computes_candidates_again_and_keeps_the_beams() -> None:
    cluster = make_cluster(depth=2, enable_prefix_cache=True)
    group = add_beams(cluster, 3)
    for _ in range(4):
        cluster.step()
        cluster.start()
        cluster.fail_steps()
        cluster.scheduler.check()
    assert group.sequences[0].num_output_tokens == 4
    cluster.finish_and_compare()


def test_beams_of_an_earlier_life_go_on() -> None:
    once = make_cluster()
    life = add_beams(once, 3, 6)
    while life.sequences[0].num_output_tokens < 4:
        once.step()
    ranks = once.by_rank(life)
    again = make_cluster()
    sequences = [Sequence(0, list(PROMPT), 6, 6, frozenset())]
    sequences += [Sequence(i + 1, list(beam.token_ids), 6, 6, frozenset()) for i, beam in enumerate(ranks)]
    group = SequenceGroup(sequences, arrival=0, awaits_host=True)
    again.scheduler.add(group)
    assert group.live == sequences[1:]
    plan = again.scheduler.schedule("w")
    assert plan is not None and len(plan.candidate_rows) == 3
    again.scheduler.apply("w", plan.step_id, [])
    placed = again.scheduler.replace_beams(group, [(sequences[1], 1), (sequences[1], 2), (sequences[3], 3)])
    assert placed == [sequences[1], sequences[0], sequences[3]]
    assert sequences[2].status is SequenceStatus.IDLE
    again.scheduler.finish_group(group)
    again.assert_idle_and_unleaked()


def test_a_beam_group_ends_with_its_last_live_beam() -> None:
    cluster = make_cluster()
    group = add_beams(cluster, 3)
    cluster.step()
    for s in group.live:
        cluster.scheduler.finish(s)
    assert group.is_finished
    cluster.assert_idle_and_unleaked()
    waiting = add_beams(cluster, 3)
    cluster.scheduler.finish(waiting.sequences[0])
    assert waiting.is_finished
    cluster.assert_idle_and_unleaked()
    assert group.is_finished and not group.awaits_decision


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preempt_every", [None, 3])
@pytest.mark.parametrize("budget", [5, 64])
def test_mixed_requests_in_a_pool_little_larger_than_the_largest_group_equal_an_unconstrained_run(
    depth: int, enable_prefix_cache: bool, preempt_every: int | None, budget: int
) -> None:
    # The largest has 4 members of 20 + 12 tokens: 5 shared blocks, 3 more each: 17 blocks. 1.2 times that is 20.
    cluster = make_cluster(
        num_blocks=20,
        depth=depth,
        budget=budget,
        enable_prefix_cache=enable_prefix_cache,
        preempt_every=preempt_every,
    )
    rng = random.Random(5)
    for _ in range(60):
        prompt = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 21))]
        num_sequences, is_beam = rng.choice([(1, False), (1, False), (4, False), (4, True)])
        cluster.add_group(prompt, num_sequences, rng.randrange(1, 13), is_beam=is_beam)
    cluster.run_until_idle()
    assert cluster.stats().num_preemptions > 0
    cluster.assert_outputs_are_unconstrained()
    cluster.assert_idle_and_unleaked()


def test_the_reference_search_is_a_search() -> None:
    beams = unconstrained_beams(PROMPT, 6, 4)
    assert len({tuple(beam) for beam in beams}) == 4
    assert beams[0] != unconstrained_beams(PROMPT, 6, 1)[0] or beams[0] != unconstrained_beams(PROMPT[:4], 6, 4)[0]


def test_beams_without_output_are_idle_before_a_group_runs_but_for_the_first_of_a_new_one() -> None:
    live, idle, finished = SequenceStatus.WAITING, SequenceStatus.IDLE, SequenceStatus.FINISHED
    for outputs, statuses in (([[], [], []], [live, idle, finished]), ([[], [1], []], [idle, live, finished])):
        group = make_new_group(PROMPT, *outputs)
        group.sequences[2].status = finished
        idle_unused_beams(group)
        assert [sequence.status for sequence in group.sequences] == statuses


def test_a_dropped_beam_holds_nothing_but_its_seat_and_a_fork_is_like_its_parent() -> None:
    worker = make_worker()
    group = make_group([1] * 7, [2], [3], awaits_host=True)  # 8 tokens: two full blocks
    kept, dropped = start(worker, group).sequences
    launch_rows(worker, group)
    execute(worker)
    seat, parent_hashes = dropped.seat, list(kept.block_hashes)
    kept.num_tokens_at_start = 5
    assert replace_beams(worker, group, [(kept, 4)]) == [kept]
    assert dropped.status is SequenceStatus.IDLE and dropped.seat == seat
    assert worker.running == [kept] and worker.freed_seats == [seat]
    assert (dropped.num_computed_tokens, dropped.block_table) == (0, []) and worker.blocks.num_used_blocks == 2
    launch_rows(worker, group)
    execute(worker)
    assert replace_beams(worker, group, [(kept, 5), (kept, 6)]) == [kept, dropped]
    assert worker.running == [kept, dropped]
    assert [sequence.status for sequence in group.sequences] == [SequenceStatus.RUNNING] * 2
    assert (kept.token_ids[7:], dropped.token_ids[7:]) == ([2, 4, 5], [2, 4, 6])
    assert dropped.block_hashes == kept.block_hashes == parent_hashes and parent_hashes
    assert dropped.block_hashes is not kept.block_hashes
    assert dropped.num_tokens_at_start == 5 and dropped.num_computed_tokens == 9


def test_a_beam_that_was_idle_loses_nothing_by_a_preemption() -> None:
    worker = make_worker()
    group = make_group([1] * 7, [2], [3], awaits_host=True)
    kept, dropped = start(worker, group).sequences
    launch_rows(worker, group)
    execute(worker)
    replace_beams(worker, group, [(kept, 4)])
    worker.preempt(group)
    assert (kept.num_lost_tokens, dropped.num_lost_tokens) == (8, 0)


def test_what_a_dropped_beam_has_computed_stays_in_the_cache() -> None:
    worker = make_worker()
    group = start(worker, make_group([1] * 7, [2], [3], awaits_host=True))
    dropped, kept = group.sequences
    for _ in range(2):  # seven tokens, then the eighth: a row of one token puts no block into the cache
        launch_rows(worker, group, budget=7)
        execute(worker)
    full = dropped.block_table[1]
    assert not worker.blocks.is_findable(full)
    replace_beams(worker, group, [(kept, 4)])
    assert worker.blocks.is_findable(full) and worker.blocks.num_cached_blocks == 1


class ScriptedCluster(Cluster):
    """A cluster whose beams go on as the test says, before they go on by their candidates."""

    def __init__(self, config: SchedulerConfig, script: list[list[tuple[int, int]]]) -> None:
        super().__init__(config)
        self.script = script  # for each decision the survivors: index in the group, token

    def search_on(self, worker_id: str, step_id: int) -> None:
        groups = dict.fromkeys(beam.group for beam in self.candidate_sequences[worker_id, step_id])
        if not groups or not self.script:
            super().search_on(worker_id, step_id)
            return
        (group,) = groups
        survivors = [(group.sequences[index], token_id) for index, token_id in self.script.pop(0)]
        self.ranks[group] = self.scheduler.replace_beams(group, survivors)


@pytest.mark.parametrize("stop", ["pause", "drain", "preemption"])
def test_a_beam_that_was_forked_again_does_not_name_the_block_that_its_parent_goes_on_to_fill(stop: str) -> None:
    config = SchedulerConfig(
        max_num_batched_tokens=64,
        pipeline_depth=2,
        watermark=0.0,
        preemption="recompute",
        preempt_every=5 if stop == "preemption" else None,
    )
    cluster = ScriptedCluster(config, [[(0, 5), (0, 6)], [(1, 5), (1, 6)]])
    cluster.add_worker(num_blocks=4)
    other = cluster.add([1, 2], 6)
    group = cluster.add_group([3, 4], 2, 6, is_beam=True)
    cancelled = cluster.add([5], 3)
    child, parent = group.sequences
    cluster.step()
    cluster.start()  # all beams have blocks of their own
    cluster.start()  # the two others alone
    cluster.complete()
    assert child.fork_tail == parent.block_table[0], "it was dropped, and forked from the other"
    cluster.scheduler.finish(cancelled)  # its block comes back with the step in flight
    plan = cluster.start()
    assert plan is not None and plan.sequences == [other, parent], "there is no block for the copy yet"
    cluster.complete()
    assert parent.num_computed_tokens == 4, "the block is full"
    if stop == "pause":
        cluster.scheduler.pause(group, keep_on_host=False)
    elif stop == "drain":
        cluster.add_worker("v", num_blocks=20)
        cluster.scheduler.workers.drain_worker("w")
    else:
        cluster.start()
        assert group.num_preemptions == 1
    cluster.scheduler.check()
    cluster.scheduler.resume(group)
    cluster.run_until_idle()
    cluster.assert_idle_and_unleaked()


@pytest.mark.parametrize("seed", [22, 87, *range(6)])  # in the first two a beam without room for its row is stopped
def test_beams_without_room_that_are_stopped_at_any_moment_equal_an_unconstrained_run(seed: int) -> None:
    rng = random.Random(seed)
    cluster = make_cluster(num_blocks=9, depth=2, enable_prefix_cache=True)  # the largest group needs all
    for _ in range(300):
        groups = list(dict.fromkeys(sequence.group for sequence in cluster.sequences if not sequence.is_finished))
        if len(groups) < 7:
            prompt = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 5))]
            is_beam = rng.random() < 0.5
            cluster.add_group(prompt, 3 if is_beam else 1, rng.randrange(2, 9), is_beam=is_beam)
            continue
        action = rng.random()
        if action < 0.45:
            cluster.start()
        elif action < 0.9:
            if cluster.in_flight["w"]:
                cluster.complete()
        elif action < 0.93:
            cluster.scheduler.finish_group(rng.choice(groups))
        elif action < 0.96:
            group = rng.choice(groups)
            cluster.scheduler.pause(group, keep_on_host=False)
            cluster.scheduler.resume(group)
        cluster.scheduler.check()
    cluster.finish_and_compare()
