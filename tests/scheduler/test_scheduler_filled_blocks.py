"""Blocks filled by decoding enter the prefix cache apart from the step that fills them. Blocks hold 4 tokens."""

import pytest

from scheduler_svc.core.block_hash import extend_block_hashes
from scheduler_svc.core.scheduler_config import SchedulerConfig
from tests.scheduler.core_cluster import Cluster


def decode_beyond_a_block() -> tuple[Cluster, list[int]]:
    """Run a sequence until its second block is filled; return it and those eight tokens."""
    cluster = Cluster(SchedulerConfig(pipeline_depth=1, watermark=0.0))
    cluster.add_worker(num_blocks=40)
    sequence = cluster.add([1, 2, 3, 4], 12)
    for _ in range(5):  # 4 tokens of the prompt, then the 5th to 8th: all of two blocks are computed
        cluster.step()
    assert sequence.num_computed_tokens == 8 and len(sequence.token_ids) == 9
    plan = cluster.start()  # the 9th needs a third block
    assert plan is not None and plan.append_pairs == [sequence.seat, sequence.block_table[2]]
    return cluster, sequence.token_ids[:8]


@pytest.mark.parametrize("is_asked", [True, False])
def test_blocks_filled_by_decoding_are_shared_while_their_sequence_runs(is_asked: bool) -> None:
    cluster, tokens = decode_beyond_a_block()
    assert cluster.stats().num_prefix_hit_tokens == 0
    if is_asked:
        cluster.scheduler.cache_decoded_blocks("w")
        cluster.scheduler.cache_decoded_blocks("w")  # again is harmless
    cluster.complete()
    other = cluster.add([*tokens, 99], 2)
    cluster.step()  # asks itself if nobody has
    assert other.num_cached_tokens == 8
    cluster.finish_and_compare()


def test_what_a_failed_step_was_to_fill_is_offered_when_it_is_computed_again() -> None:
    cluster, tokens = decode_beyond_a_block()
    cluster.fail_steps()
    cluster.scheduler.cache_decoded_blocks("w")
    cluster.scheduler.check()
    other = cluster.add([*tokens, 99], 2)
    cluster.step()
    assert other.num_cached_tokens == 8  # the steps that computed these were executed
    cluster.finish_and_compare()


def test_a_sequence_that_has_ended_meanwhile_is_passed_over() -> None:
    cluster, tokens = decode_beyond_a_block()
    (sequence,) = [each for each in cluster.sequences if each.seat is not None]
    cluster.scheduler.finish(sequence)
    cluster.scheduler.cache_decoded_blocks("w")
    cluster.scheduler.check()
    cluster.complete()
    other = cluster.add([*tokens, 99], 2)
    cluster.step()
    assert other.num_cached_tokens == 8  # offered when it ended


@pytest.mark.parametrize("is_asked", [True, False])
def test_blocks_filled_by_decoding_can_be_pinned_as_soon_as_the_cache_was_brought_up_to_date(is_asked: bool) -> None:
    cluster, tokens = decode_beyond_a_block()
    cluster.complete()
    hashes: list[bytes] = []
    extend_block_hashes(hashes, b"", tokens, 4, 2)
    if is_asked:
        cluster.scheduler.cache_decoded_blocks("w")
    assert cluster.scheduler.workers.pin_blocks("w", "prefix", hashes) is is_asked
