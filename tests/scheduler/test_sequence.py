"""A sequence's derived facts, and the hash chain of its blocks."""

import hashlib

import pytest

from scheduler_svc.core.block_hash import extend_block_hashes, hash_block, root_hash
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.waiting_queue import WaitingQueue
from tests.scheduler.core_cluster import single
from tests.scheduler.worker_states import pop_head


def make_sequence(
    token_ids: tuple[int, ...] = (1, 2, 3),
    *,
    seq_id: int = 0,
    num_prompt_tokens: int | None = None,
    max_tokens: int = 4,
    min_tokens: int = 0,
) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        max_tokens=max_tokens,
        stop_token_ids=frozenset({9}),
        min_tokens=min_tokens,
    )


def test_tokens_beyond_the_prompt_are_output() -> None:
    sequence = make_sequence((1, 2, 3, 4, 5), num_prompt_tokens=3)
    assert sequence.output_token_ids == [4, 5]
    assert sequence.num_output_tokens == 2
    assert sequence.worst_case_tokens == 3 + 4


def test_a_pending_token_is_a_token_but_no_output() -> None:
    sequence = make_sequence((1, 2, 3, 4), num_prompt_tokens=3, max_tokens=2)
    assert not sequence.has_all_tokens
    sequence.num_pending_tokens = 1
    assert sequence.num_tokens == 5
    assert sequence.num_output_tokens == 1
    assert sequence.has_all_tokens


def test_a_stop_token_counts_only_as_output_and_from_min_tokens_on() -> None:
    assert not make_sequence((1, 9)).ends_with_stop_token()
    assert make_sequence((1, 9), num_prompt_tokens=1).ends_with_stop_token()
    assert not make_sequence((1, 9), num_prompt_tokens=1, min_tokens=2).ends_with_stop_token()
    assert make_sequence((1, 8, 9), num_prompt_tokens=1, min_tokens=2).ends_with_stop_token()


@pytest.mark.parametrize("num_prompt_tokens", [0, 4])
def test_a_prompt_that_is_empty_or_longer_than_the_tokens_is_refused(num_prompt_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"num_prompt_tokens is {num_prompt_tokens}: give 1 to 3"):
        make_sequence(num_prompt_tokens=num_prompt_tokens)


def test_a_sequence_of_no_output_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0: give at least 1"):
        make_sequence(max_tokens=0)


def test_a_block_hash_is_sha256_over_parent_and_little_endian_ids() -> None:
    # The same in every process and on every machine, for ever: hashes may be stored.
    parent = hashlib.sha256(b"tenant").digest()
    expected = hashlib.sha256(parent + bytes([1, 0, 0, 0, 2, 1, 0, 0])).digest()
    assert hash_block(root_hash(b"tenant"), [1, 258]) == expected


def test_hashes_are_chained_and_seeded() -> None:
    def hashes_of(token_ids: list[int], seed: bytes = b"") -> list[bytes]:
        hashes: list[bytes] = []
        extend_block_hashes(hashes, seed, token_ids, 2, len(token_ids) // 2)
        return hashes

    assert hashes_of([1, 2, 3, 4])[0] == hashes_of([1, 2, 5, 6])[0]
    assert hashes_of([1, 2, 3, 4])[1] != hashes_of([7, 8, 3, 4])[1]
    assert hashes_of([1, 2], b"a") != hashes_of([1, 2], b"b")
    assert hashes_of([3, 4, 3, 4])[0] != hashes_of([3, 4, 3, 4])[1]


def test_a_hash_that_is_there_is_not_made_again() -> None:
    hashes = [b"made before"]
    extend_block_hashes(hashes, b"", [1, 2, 3, 4, 5, 6], 2, 3)
    assert hashes[0] == b"made before"
    assert hashes[1] == hash_block(b"made before", [3, 4])
    assert hashes[2] == hash_block(hashes[1], [5, 6])
    extend_block_hashes(hashes, b"", [1, 2], 2, 1)
    assert len(hashes) == 3


def make_group(seq_id: int, priority: int = 0) -> SequenceGroup:
    group = single(make_sequence(seq_id=seq_id), priority)
    group.order = (priority, seq_id)
    return group


def test_the_queue_serves_by_priority_then_arrival() -> None:
    queue = WaitingQueue()
    for seq_id, priority in [(5, 0), (3, 1), (4, 0), (1, 1), (2, 2)]:
        queue.push(make_group(seq_id, priority))
    assert [pop_head(queue).arrival for _ in range(5)] == [4, 5, 1, 3, 2]
    assert queue.peek() is None


def test_a_discarded_group_is_gone_from_head_and_middle() -> None:
    queue = WaitingQueue()
    groups = [make_group(seq_id) for seq_id in range(200)]
    for group in groups:
        queue.push(group)
    for group in groups:
        if group.arrival % 50 != 7:
            queue.discard(group)
            queue.discard(group)
    assert len(queue) == queue.num_sequences == 4
    assert queue.num_tokens == 4 * 3
    assert {group.arrival for group in queue} == {7, 57, 107, 157}
    assert groups[57] in queue and groups[58] not in queue
    assert [pop_head(queue).arrival for _ in range(4)] == [7, 57, 107, 157]
    assert queue.num_tokens == queue.num_sequences == 0


def test_a_new_sequence_waits_with_nothing_computed() -> None:
    sequence = make_sequence()
    assert sequence.status is SequenceStatus.WAITING
    assert not sequence.is_finished
    assert sequence.seat is None and sequence.worker_id is None and sequence.block_table == []


def test_a_group_that_is_taken_out_and_pushed_again_is_served_once_at_its_place() -> None:
    queue = WaitingQueue()
    groups = [make_group(seq_id) for seq_id in range(3)]
    for group in groups:
        queue.push(group)
    for _ in range(50):  # more stale entries than valid ones
        queue.discard(groups[1])
        groups[1].move_to(GroupState.PAUSED)
        queue.push(groups[1])
    queue.discard(groups[0])
    assert len(queue) == queue.num_ahead(0, None) == 2
    assert [pop_head(queue).arrival, pop_head(queue).arrival] == [1, 2]
    assert queue.peek() is None and len(queue) == queue.num_groups == 0
