"""Tokens that a worker forces: outputs are those of single tokens, however many come at once, and none is too many."""

from collections.abc import Callable

import pytest

from common.sampling_params import SequenceSampling
from common.step import StepResult
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.requests.live.result_check import ImpossibleAnswerError, check_forced
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.core_executor import VOCAB_SIZE

FORCES = SequenceSampling(seed=0, grammar="{}", forces_text=True)


def cluster_of(depth: int, block_size: int = 4, most_forced: int = 3, num_host_blocks: int = 0) -> Cluster:
    cluster = Cluster(SchedulerConfig(pipeline_depth=depth), most_forced=most_forced)
    cluster.add_worker(num_blocks=40, block_size=block_size, num_host_blocks=num_host_blocks)
    return cluster


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_outputs_are_those_of_single_tokens(depth: int, block_size: int) -> None:
    cluster = cluster_of(depth, block_size)
    for length in range(1, 6):
        cluster.add(list(range(1, length + 1)), 5 + length, stops=length % 2 == 0)
    cluster.finish_and_compare()
    assert cluster.num_forced if block_size == 16 else True  # a block of one token has no room, but for the spare one
    plain = cluster_of(depth, block_size, most_forced=0)
    plain.add(list(range(1, 6)), 10)
    plain.run_until_idle()
    assert plain.num_forced == 0
    assert plain.sequences[0].token_ids == cluster.sequences[4].token_ids


def test_steps_are_fewer_by_the_forced_tokens() -> None:
    cluster = cluster_of(1, 16)
    sequence = cluster.add([1, 2, 3], 12)
    cluster.run_until_idle()
    assert cluster.num_forced > 2
    assert cluster.num_plans <= sequence.num_output_tokens - cluster.num_forced + 3  # the last go beyond its end


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_no_output_is_longer_than_it_may_be(max_tokens: int) -> None:
    cluster = cluster_of(2, 16, most_forced=16)
    sequence = cluster.add([1, 2, 3], max_tokens)
    cluster.run_until_idle()
    assert sequence.num_output_tokens == max_tokens
    cluster.assert_outputs_are_unconstrained()


def test_a_stop_token_among_the_forced_ones_is_the_last() -> None:
    cluster = cluster_of(2, 16, most_forced=16)
    for number in range(30):
        cluster.add([number % 16 + 1, number // 16 + 1], 40, stops=True)
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()
    stopped = [s for s in cluster.sequences if s.ends_with_stop_token()]
    assert stopped and cluster.num_forced
    assert all(0 not in s.output_token_ids[:-1] for s in cluster.sequences)


def forced_in_flight(change: Callable[[Cluster, Sequence], None], num_host_blocks: int = 0) -> Cluster:
    """Do something while a step in flight forces tokens that nobody knows of, and one is planned behind it."""
    cluster = cluster_of(2, 16, num_host_blocks=num_host_blocks)
    sequence = cluster.add([1, 2, 3], 30)
    for _ in range(20):
        cluster.start()
        cluster.start()
        num_before = cluster.num_forced
        change(cluster, sequence)
        while cluster.in_flight["w"]:
            cluster.complete()
        cluster.scheduler.check()
        if cluster.num_forced > num_before + 1:
            break
        if sequence.group.is_paused:
            cluster.scheduler.resume(sequence.group)
    else:
        pytest.fail("nothing was forced")
    if sequence.group.is_paused:
        cluster.scheduler.resume(sequence.group)
    cluster.finish_and_compare()
    return cluster


@pytest.mark.parametrize("keep_on_host", [False, True])
def test_a_pause_keeps_them(keep_on_host: bool) -> None:
    forced_in_flight(
        lambda cluster, sequence: cluster.scheduler.pause(sequence.group, keep_on_host=keep_on_host),
        num_host_blocks=40,
    )


def test_more_than_a_paused_sequence_is_to_get_are_believed_and_dropped() -> None:
    """The worker does not know where it ends, and its blocks had room for them."""
    cluster = cluster_of(2, 16, most_forced=0)
    sequence = cluster.add([1, 2, 3, 4], 2)
    cluster.step()
    plan = cluster.start()
    assert plan is not None
    cluster.scheduler.pause(sequence.group, keep_on_host=False)
    check(cluster, plan, [5] * 14)
    with pytest.raises(ImpossibleAnswerError, match="15 forced tokens of sample 0, where 14 have room"):
        check(cluster, plan, [5] * 15)
    appended = cluster.scheduler.apply("w", plan.step_id, [6], {0: [5] * 14})
    assert [token for _, token in appended] == [5] and sequence.num_output_tokens == 2


@pytest.mark.parametrize("depth", [2, 3])
def test_steps_behind_them_may_sample_behind_the_end(depth: int) -> None:
    for max_tokens in range(2, 9):
        cluster = cluster_of(depth, 4)
        cluster.add([1, 2, 3], max_tokens)
        while cluster.start() is not None or cluster.in_flight["w"]:
            while cluster.start() is not None:
                pass
            cluster.complete()
            cluster.scheduler.check()
        cluster.assert_outputs_are_unconstrained()
        cluster.assert_idle_and_unleaked()


def test_a_step_behind_them_that_is_undone_leaves_their_positions() -> None:
    cluster = cluster_of(2, 16)
    sequence = cluster.add([1, 2, 3], 30)
    while True:
        cluster.start()
        cluster.start()
        before = cluster.num_forced
        cluster.complete()
        if cluster.num_forced > before:
            break
    assert sequence.num_computed_tokens == sequence.num_tokens - 1
    cluster.fail_steps()
    assert sequence.num_computed_tokens == sequence.num_tokens - 1 == len(sequence.token_ids) - 1
    cluster.run_until_idle()
    cluster.assert_outputs_are_unconstrained()


def test_the_plan_gets_the_tokens_that_were_computed() -> None:
    cluster = cluster_of(2, 16)
    cluster.add([1, 2, 3], 30)
    while not cluster.num_forced:
        cluster.start()
        cluster.start()
        first, second = cluster.plans["w"]
        cluster.complete()
    assert first.num_tokens == [1 + cluster.num_forced]
    assert second.positions == [first.positions[0] + first.num_tokens[0]]


def decoding(block_size: int = 4) -> tuple[Cluster, StepPlan, Sequence]:
    """A sequence whose step decodes its fifth token: with blocks of four there is room for two more, one is spare."""
    cluster = cluster_of(2, block_size, most_forced=0)
    sequence = cluster.add([1, 2, 3, 4], 9)
    cluster.step()
    plan = cluster.start()
    assert plan is not None
    return cluster, plan, sequence


def check(cluster: Cluster, plan: StepPlan, forced: list[int], sampling: SequenceSampling = FORCES) -> None:
    result = StepResult(epoch=1, step_id=plan.step_id, token_ids=[1], forced={0: forced})
    check_forced(
        plan, result, VOCAB_SIZE, {plan.sampled_sequences[0].seq_id: sampling}, cluster.scheduler.num_forceable
    )


def test_forced_tokens_that_have_room_are_believed() -> None:
    cluster, plan, _ = decoding()
    check(cluster, plan, [0, VOCAB_SIZE - 1])


@pytest.mark.parametrize(
    ("forced", "sampling", "reason"),
    [
        ([1, VOCAB_SIZE], FORCES, "a forced token of sample 0 is beyond the vocabulary of 17"),
        ([-1], FORCES, "a forced token of sample 0 is beyond the vocabulary of 17"),
        ([1, 2, 3], FORCES, "3 forced tokens of sample 0, where 2 have room"),
        ([1], SequenceSampling(seed=0, grammar="{}"), "which has no grammar, or needs each by itself"),
        ([1], SequenceSampling(seed=0), "which has no grammar, or needs each by itself"),
    ],
)
def test_others_are_not(forced: list[int], sampling: SequenceSampling, reason: str) -> None:
    cluster, plan, _ = decoding()
    with pytest.raises(ImpossibleAnswerError, match=reason):
        check(cluster, plan, forced, sampling)


@pytest.mark.parametrize("length", [2, 4])
def test_none_is_forced_while_a_prompt_of_several_tokens_is_computed(length: int) -> None:
    cluster = cluster_of(2, 16, most_forced=0)
    cluster.add([1, 2, 3, 4][:length], 9)
    plan = cluster.start()
    assert plan is not None
    with pytest.raises(ImpossibleAnswerError, match="1 forced tokens of sample 0, where 0 have room"):
        check(cluster, plan, [1])


def test_of_a_sequence_that_has_ended_any_are_believed_since_none_is_taken() -> None:
    cluster, plan, sequence = decoding()
    cluster.scheduler.finish(sequence)
    check(cluster, plan, [1] * 50)
    assert cluster.scheduler.apply("w", plan.step_id, [1], {0: [1] * 50}) == []


def test_of_a_sequence_that_was_preempted_none_is_believed_where_a_block_holds_one_token() -> None:
    cluster, plan, sequence = decoding(block_size=1)
    cluster.scheduler.pause(sequence.group, keep_on_host=False)
    with pytest.raises(ImpossibleAnswerError, match="1 forced tokens of sample 0, where 0 have room"):
        check(cluster, plan, [1])


def test_of_a_sequence_that_was_preempted_no_more_are_taken_than_it_may_have() -> None:
    cluster, plan, sequence = decoding()
    cluster.scheduler.pause(sequence.group, keep_on_host=False)
    check(cluster, plan, [1] * 2)
    with pytest.raises(ImpossibleAnswerError, match="3 forced tokens of sample 0, where 2 have room"):
        check(cluster, plan, [1] * 3)
    cluster.scheduler.apply("w", plan.step_id, [1], {0: [1] * 2})
    assert sequence.num_output_tokens == 4
    assert sequence.num_computed_tokens == 0
