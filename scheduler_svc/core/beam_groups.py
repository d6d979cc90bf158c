"""Blocks and tokens of a beam group as its hypotheses change: a beam continues, is forked, or is dropped.

`beam_search` decides which beams survive; this file carries it out.
"""

from collections.abc import Sequence as Seq

from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.starting import share_all_blocks
from scheduler_svc.core.worker_state import WorkerState


def idle_unused_beams(group: SequenceGroup) -> None:
    """Make beams without a hypothesis idle before the group runs: all but the first, or those without output."""
    has_output = any(sequence.num_output_tokens for sequence in group.sequences)
    for sequence in group.sequences[0 if has_output else 1 :]:
        if not sequence.num_output_tokens and not sequence.is_finished:
            sequence.status = SequenceStatus.IDLE


def check_decision(group: SequenceGroup, survivors: Seq[tuple[Sequence, int]]) -> None:
    """Raise ValueError if `replace_beams` cannot carry out the decision."""
    if not group.awaits_decision:
        raise ValueError(f"group {group.arrival} awaits no decision: candidates of all its beams come first")
    if not 1 <= len(survivors) <= len(group.unfinished):
        raise ValueError(f"{len(survivors)} beams survive: give 1 to {len(group.unfinished)}")
    if any(parent.group is not group or not parent.is_live for parent, _ in survivors):
        raise ValueError(f"a survivor is no live beam of group {group.arrival}")
    if len(set(survivors)) < len(survivors):
        raise ValueError(f"two survivors of group {group.arrival} are the same: give each beam and token once")


def replace_beams(worker: WorkerState, group: SequenceGroup, survivors: Seq[tuple[Sequence, int]]) -> list[Sequence]:
    """See `Scheduler.replace_beams`. Nothing of the group is in flight, so dropped blocks are free at once."""
    parents = dict.fromkeys(parent for parent, _ in survivors)
    for beam in group.live:
        if beam not in parents:
            _drop(worker, beam)
    idle = [beam for beam in group.sequences if beam.status is SequenceStatus.IDLE]
    placed: list[Sequence] = []
    gone_on: set[Sequence] = set()
    for parent, _ in survivors:
        if parent in gone_on:
            child = idle.pop(0)
            _fork(worker, parent, child)
            placed.append(child)
        else:
            gone_on.add(parent)
            placed.append(parent)
    for beam, (_, token_id) in zip(placed, survivors, strict=True):
        beam.token_ids.append(token_id)
    return placed


def _drop(worker: WorkerState, beam: Sequence) -> None:
    """Free a dead beam's blocks. It keeps its seat for a later fork; the worker is told to drop the seat's state."""
    seat = beam.seat
    assert seat is not None and beam.first_step_id, "candidates come from a step that has described the seat"
    worker.remove_running(beam)
    worker.cache_full_blocks(beam, None)
    worker.blocks.free(beam.block_table)
    worker.freed_seats.append(seat)
    beam.leave_worker()
    beam.seat = seat
    beam.num_computed_tokens = 0
    beam.status = SequenceStatus.IDLE


def _fork(worker: WorkerState, parent: Sequence, child: Sequence) -> None:
    assert parent.fork_tail is None, "a beam that has been computed has its own last block"
    child.token_ids = list(parent.token_ids)
    child.block_hashes = list(parent.block_hashes)
    child.tail = parent.tail
    share_all_blocks(worker, parent, child)
    child.num_computed_tokens = parent.num_computed_tokens
    child.num_registered_blocks = parent.num_registered_blocks
    child.num_tokens_at_start = parent.num_tokens_at_start
    child.last_step = 0  # of before it was dropped: none has computed what it holds now but the parent's
    child.status = SequenceStatus.RUNNING
    worker.add_running(child)
