"""Plan of one step of one worker, as struct of arrays.

Plain data between the scheduler and the encoder for the wire. The sequences in it are live: read a plan before the
next call of the scheduler.
"""

from dataclasses import dataclass, field
from typing import cast

from scheduler_svc.core.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """Plan of one step. The worker takes `freed_seats` before `whole`, and executes plans in the order of `step_id`."""

    worker_id: str
    step_id: int  # consecutive per worker, from 1; never used twice, so a rollback leaves a gap
    snapshot: bool  # every live seat is in `whole`; the worker drops all others first
    num_spare_positions: int = 0  # of a sequence's blocks, that forced tokens leave free: see `forced_tokens`
    sequences: list[Sequence] = field(default_factory=list)  # one a row
    seats: list[int] = field(default_factory=list)  # beside sequences: their seats, perhaps lost when the answer comes
    num_tokens: list[int] = field(default_factory=list)  # beside sequences: computed in this step, >= 1
    positions: list[int] = field(default_factory=list)  # beside sequences: position of the row's first token
    sampled_rows: list[int] = field(default_factory=list)  # rows that reach the end of their tokens
    sampled_sequences: list[Sequence] = field(default_factory=list)  # beside sampled_rows: whose token it is
    candidate_rows: list[int] = field(default_factory=list)  # rows of beams that reach the end of their tokens
    # Newly scheduled, restored or forked, and beams with a row; in a snapshot every sequence that the worker must know.
    whole: list[Sequence] = field(default_factory=list)
    append_pairs: list[int] = field(default_factory=list)  # flat (seat, block), sequences not in `whole` only
    freed_seats: list[int] = field(default_factory=list)  # to be dropped; `whole` may use them again at once
    swap_out: list[int] = field(default_factory=list)  # flat (device block, host block); before all the rest
    placed: list[int] = field(default_factory=list)  # flat (fetch, index in it, device block); after swap_out
    swap_in: list[int] = field(default_factory=list)  # flat (host block, device block); after placed, before copies
    copies: list[int] = field(default_factory=list)  # flat (source block, destination block), copy-on-write


def seat_of(sequence: Sequence) -> int:
    """Return the seat of a sequence in the step being planned."""
    assert sequence.seat is not None, "a scheduled sequence has a seat"
    return sequence.seat


def seats_of(sequences: list[Sequence]) -> list[int]:
    """Return the seats of sequences in the step being planned."""
    seats = [sequence.seat for sequence in sequences]
    assert None not in seats, "scheduled sequences have seats"
    return cast("list[int]", seats)
