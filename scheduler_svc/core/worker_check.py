"""Invariants of one worker (blocks, seats, pending tokens, one writer a block), of the queue and of paused groups.

Assertions only, for tests and for an idle engine; they change nothing.
"""

from collections import Counter
from collections.abc import Iterable

from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.worker_state import WorkerState, blocks_held


def check_worker(worker: WorkerState) -> None:
    """Assert the invariants of one worker."""
    groups = list(dict.fromkeys(sequence.group for sequence in worker.running))
    _check_blocks(worker)
    _check_seats(worker, groups)
    _check_single_writers(worker)
    assert [s.sort_key for s in worker.running] == sorted(s.sort_key for s in worker.running)
    first_id = worker.next_step_id - len(worker.in_flight)
    assert worker.catching_up.keys() == {s for s in worker.running if not s.is_decoding}
    assert [step.plan.step_id for step in worker.in_flight] == list(range(first_id, worker.next_step_id))
    pending = Counter(sequence for step in worker.in_flight for sequence in step.plan.sampled_sequences)
    pending += Counter(step.plan.sequences[row] for step in worker.in_flight for row in step.plan.candidate_rows)
    for sequence in worker.running:
        assert sequence.num_pending_tokens == pending[sequence]
        _check_running(worker, sequence)
    _check_host(worker)
    for group in worker.paused:
        assert group.is_paused and (group.num_pending_tokens > 0 or group.swap_step is not None)
    for group in [*worker.parked, *worker.paused]:
        assert group.worker_id == worker.worker_id
        assert group.num_pending_tokens > 0 or group.is_paused
        for sequence in group.live:
            assert sequence.status is SequenceStatus.PREEMPTED and not sequence.block_table
            assert sequence.seat is None and sequence.fork_tail is None
            assert sequence.num_pending_tokens == pending[sequence]


def check_waiting(groups: Iterable[SequenceGroup]) -> None:
    """Assert that groups in the queue hold nothing."""
    for group in groups:
        assert group.worker_id is None and group.live
        _check_holds_nothing(group)


def check_paused(groups: Iterable[SequenceGroup]) -> None:
    """Assert that paused groups without a worker hold nothing; for the others see `check_worker`."""
    for group in groups:
        assert group.live
        if group.worker_id is None:
            _check_holds_nothing(group)


def _check_blocks(worker: WorkerState) -> None:
    held = [
        *(blocks_held(sequence) for sequence in worker.running),
        *worker.pins.values(),
        *worker.read_by_fetches.values(),
        *worker.placed_by_fetches.values(),
    ]
    assert worker.num_pinned_blocks == len({block for blocks in worker.pins.values() for block in blocks})
    for step in worker.in_flight:
        held += [release.blocks for release in step.releases]
        held.append(step.copy_sources)
    worker.blocks.check(Counter(block for blocks in held for block in blocks))
    assert worker.copy_holds == Counter(block for step in worker.in_flight for block in step.copy_sources)


def _check_host(worker: WorkerState) -> None:
    away = [*worker.parked, *worker.paused]
    swapped = [*worker.swapped, *(group for group in away if group.swap_step is not None)]
    holders = Counter(block for group in swapped for sequence in group.live for block in sequence.host_blocks)
    if worker.host is None:
        assert not swapped
        return
    worker.host.check(holders)
    unsent = worker.unsent_swap_out[1::2]
    assert len(set(unsent)) == len(unsent) and set(unsent) <= holders.keys()
    assert [group.order for group in worker.swapped] == sorted(group.order for group in worker.swapped)
    for group in worker.swapped:
        assert group.num_pending_tokens == 0 and group.worker_id == worker.worker_id and group not in worker.parked
        for sequence in group.live:
            assert sequence.status is SequenceStatus.PREEMPTED and sequence.seat is None and not sequence.block_table
            num_filled = worker.num_blocks_for(sequence.num_computed_tokens)
            assert len(sequence.host_blocks) == num_filled and sequence.num_computed_tokens < sequence.num_tokens


def _check_holds_nothing(group: SequenceGroup) -> None:
    for sequence in group.live:
        assert sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
        assert sequence.worker_id is None and sequence.seat is None and not sequence.block_table
        assert sequence.fork_tail is None and sequence.source is None and not sequence.host_blocks
        assert sequence.num_computed_tokens == sequence.num_pending_tokens == 0


def _check_seats(worker: WorkerState, groups: list[SequenceGroup]) -> None:
    members = [sequence for group in groups for sequence in group.unfinished]
    assert len(members) == worker.num_members
    seats = worker.free_seats + [release.seat for step in worker.in_flight for release in step.releases]
    seats += [sequence.seat for sequence in members if sequence.seat is not None]
    assert sorted(seats) == list(range(worker.num_seats)), "a seat is lost or held twice"


def _check_single_writers(worker: WorkerState) -> None:
    """Assert that each block yet to be written is in one table only, or in tables that wait for its writer."""
    writer_of: dict[int, Sequence] = {}
    for sequence in worker.running:
        num_read = sequence.num_computed_tokens if sequence.source is None else sequence.num_shared_tokens
        for block in sequence.block_table[num_read // worker.block_size :]:
            assert block not in writer_of, f"block {block} has two writers"
            assert not worker.blocks.is_findable(block), f"block {block} can be found and is written"
            writer_of[block] = sequence
    for sequence in worker.running:
        if sequence.source is None:
            for block in sequence.block_table:
                assert writer_of.get(block, sequence) is sequence, f"block {block} is written under a reader"


def _check_running(worker: WorkerState, sequence: Sequence) -> None:
    assert sequence.status is SequenceStatus.RUNNING and sequence.worker_id == worker.worker_id
    assert sequence.seat is not None and sequence.group.worker_id == worker.worker_id
    assert 0 <= sequence.num_computed_tokens <= sequence.num_tokens
    # Steps that were planned without knowing of forced tokens may sample behind the end: that is dropped.
    assert len(sequence.token_ids) <= sequence.worst_case_tokens
    assert sequence.num_computed_tokens < sequence.num_tokens or sequence.group.awaits_host
    num_held = len(blocks_held(sequence))
    assert worker.num_blocks_for(sequence.num_computed_tokens) <= num_held <= worker.num_blocks_for(sequence.num_tokens)
    assert sequence.num_registered_blocks <= max(len(sequence.block_hashes), len(sequence.block_table))
    assert sequence.num_cached_tokens < sequence.num_prompt_tokens, "the last token of a prompt is computed"
    if sequence.source is not None:
        assert sequence.num_computed_tokens == sequence.first_step_id == 0
        assert sequence.source.status is SequenceStatus.RUNNING and sequence.source.group is sequence.group
    if sequence.is_decoding:
        assert sequence.group.has_caught_up and sequence.num_tokens - sequence.num_computed_tokens == 1
