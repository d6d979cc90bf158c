"""Checks that a step can be executed: every number in it, against the seats as the step itself changes them.

Pure: changes a copy of the seats' counts, or copies nothing if the step changes none, so a step is applied as a whole
or not at all. The result holds the step's arrays decoded, so that the message is decoded once.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.bounds import MOST_READ_BLOCKS
from common.step import SequenceState, Step
from worker_svc.steps.array_checks import (
    as_ids,
    as_pairs,
    as_triples,
    check_distinct,
    check_live,
    check_range,
    count_earlier_equals,
    refuse_where,
)
from worker_svc.steps.sampling_check import check_sampling
from worker_svc.steps.step_limits import InvalidStepError, StepLimits

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
BlockPairs = list[tuple[int, int]]
PlacedBlocks = list[tuple[int, int, int]]  # (fetch, index in it, device block)
_NONE: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class SeatCounts:
    """Progress of each seat; arrays [num_seats]."""

    live: BoolArray
    num_blocks: IntArray  # in the block table
    positions: IntArray  # tokens whose keys and values are in the blocks
    num_known: IntArray  # tokens that the worker knows, computed or not

    @classmethod
    def empty(cls, num_seats: int) -> "SeatCounts":
        zeros = [np.zeros(num_seats, dtype=np.int64) for _ in range(3)]
        return cls(np.zeros(num_seats, dtype=np.bool_), *zeros)

    def copy(self) -> "SeatCounts":
        return SeatCounts(self.live.copy(), self.num_blocks.copy(), self.positions.copy(), self.num_known.copy())


@dataclass(frozen=True, slots=True)
class Appended:
    """Blocks appended to block tables: three arrays of equal length."""

    seats: IntArray
    columns: IntArray  # of the block table
    blocks: IntArray


# Most steps only compute. Arrays that they leave empty are not checked, since the device is idle meanwhile.
_NOTHING_APPENDED = Appended(_NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class StepRows:
    """R rows to compute, S samples to draw from them, and C rows to rank, from which no sample is drawn."""

    seats: IntArray  # [R]
    starts: IntArray  # [R] position of the first token
    ends: IntArray  # [R] position after the last token
    sample_rows: IntArray  # [S]
    sample_seats: IntArray  # [S]
    candidate_rows: IntArray  # [C]
    candidate_counts: IntArray  # [C] how many next tokens, at most the vocabulary
    named: Sequence[int] = ()  # seats, in the step's own array
    is_decode: bool = False  # one token a row, and each row samples for its own seat

    @property
    def num_tokens(self) -> IntArray:
        return self.ends - self.starts

    @property
    def sample_positions(self) -> IntArray:
        """Positions that the sampled tokens will have, [S]."""
        return self.ends[self.sample_rows]


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A step that can be executed."""

    counts: SeatCounts  # after the step, but before its rows
    appended: Appended
    swap_out: BlockPairs  # (device block, host block)
    placed: PlacedBlocks  # whether they have come is for `FetchedBlocks` to say
    swap_in: BlockPairs  # (host block, device block)
    copies: BlockPairs  # (source block, destination block)
    rows: StepRows


def check_step(step: Step, counts: SeatCounts, limits: StepLimits, rows_before: StepRows | None = None) -> CheckedStep:
    """Raises InvalidStepError, with field and index, at the first entry that is invalid.

    `rows_before`: rows of the last applied step; the seats of equal rows are not checked again.
    """
    changes_seats = bool(len(step.freed_seats) or step.snapshot or step.whole)
    after = counts.copy() if changes_seats or len(step.append_pairs) else counts
    _drop(step, after, limits)
    _place(step.whole, after, limits)
    return CheckedStep(
        counts=after,
        appended=_append(step, after, limits),
        swap_out=_moves("swap_out", step.swap_out, limits.num_blocks, limits.num_host_blocks),
        placed=_placed(step.placed, limits.num_blocks),
        swap_in=_moves("swap_in", step.swap_in, limits.num_host_blocks, limits.num_blocks),
        copies=_moves("copies", step.copies, limits.num_blocks, limits.num_blocks),
        rows=_rows(step, after, limits, None if changes_seats else rows_before),
    )


def _drop(step: Step, after: SeatCounts, limits: StepLimits) -> None:
    if not len(step.freed_seats) and not step.snapshot:
        return
    freed = as_ids(step.freed_seats)
    check_range("freed_seats", freed, limits.num_seats, "seat")
    if step.snapshot:
        after.live[:] = False
    else:
        check_live("freed_seats", freed, after.live)
    after.live[freed] = False


def _place(states: Sequence[SequenceState], after: SeatCounts, limits: StepLimits) -> None:
    if not states:
        return
    check_distinct("whole", as_ids([state.seat for state in states]))
    for index, state in enumerate(states):
        where = f"whole[{index}]"
        _check_state(where, state, limits)
        check_sampling(f"{where}.sampling", state.sampling, limits.vocab_size)
        after.live[state.seat] = True
        after.num_blocks[state.seat] = len(state.block_table)
        after.positions[state.seat] = state.position
        after.num_known[state.seat] = state.position + len(state.token_ids)


def _check_state(where: str, state: SequenceState, limits: StepLimits) -> None:
    num_known = state.position + len(state.token_ids)
    check_range(f"{where}.seat", as_ids([state.seat]), limits.num_seats, "seat")
    check_range(f"{where}.block_table", as_ids(state.block_table), limits.num_blocks, "block")
    check_range(f"{where}.token_ids", as_ids(state.token_ids), limits.vocab_size, "token id")
    check_range(f"{where}.history", as_ids(state.history), limits.vocab_size, "token id")
    if len(state.block_table) > limits.max_blocks:
        raise InvalidStepError(
            f"{where}.block_table has {len(state.block_table)} blocks: at most {limits.max_blocks} hold a sequence"
        )
    if state.position < 0 or num_known > limits.max_model_len:
        raise InvalidStepError(
            f"{where} goes from position {state.position} to {num_known}: a sequence is within 0 and "
            f"{limits.max_model_len} tokens"
        )
    if len(state.history) not in (0, state.position) or (
        state.sampling.needs_history and len(state.history) != state.position
    ):
        raise InvalidStepError(
            f"{where}.history has {len(state.history)} tokens: with penalties or a grammar it holds all "
            f"{state.position} before position"
        )
    # A prompt log-probability needs the next token, so a prompt that asks for them must be known to its end.
    most = limits.max_model_len if state.sampling.num_prompt_logprobs is None else num_known
    if not 0 <= state.num_prompt_tokens <= most:
        raise InvalidStepError(f"{where}.num_prompt_tokens is {state.num_prompt_tokens}: it is from 0 to {most}")


def _append(step: Step, after: SeatCounts, limits: StepLimits) -> Appended:
    if not len(step.append_pairs):
        return _NOTHING_APPENDED
    pairs = as_pairs(step.append_pairs)
    seats, blocks = pairs[:, 0], pairs[:, 1]
    check_range("append_pairs", seats, limits.num_seats, "seat")
    check_range("append_pairs", blocks, limits.num_blocks, "block")
    check_live("append_pairs", seats, after.live)
    columns = after.num_blocks[seats] + count_earlier_equals(seats)
    after.num_blocks[seats] = columns + 1  # for a seat that is named twice, the last value counts
    refuse_where(
        columns >= limits.max_blocks,
        lambda i: f"append_pairs[{i}]: seat {seats[i]} has {limits.max_blocks} blocks, which is the most",
    )
    return Appended(seats, columns, blocks)


def _moves(name: str, values: Sequence[int], num_sources: int, num_destinations: int) -> BlockPairs:
    if not len(values):
        return []
    pairs = as_pairs(values)
    check_range(f"{name} (sources)", pairs[:, 0], num_sources, "block")
    check_range(f"{name} (destinations)", pairs[:, 1], num_destinations, "block")
    check_distinct(f"{name} (destinations)", pairs[:, 1])
    return list(map(tuple, pairs.tolist()))


def _placed(values: Sequence[int], num_blocks: int) -> PlacedBlocks:
    if not len(values):
        return []
    triples = as_triples(values)
    refuse_where(triples[:, 0] < 1, lambda i: f"placed names fetch {triples[i, 0]}: fetches are counted from 1")
    check_range("placed (indices)", triples[:, 1], MOST_READ_BLOCKS, "block")
    check_range("placed (destinations)", triples[:, 2], num_blocks, "block")
    check_distinct("placed (destinations)", triples[:, 2])
    return list(map(tuple, triples.tolist()))


def _rows(step: Step, after: SeatCounts, limits: StepLimits, before: StepRows | None) -> StepRows:
    """Decode and check the rows. `before`: rows whose seats are still in use, or None."""
    if before is not None and isinstance(step.rows, array) and step.rows == before.named:
        seats = before.seats
    else:
        seats = as_ids(step.rows)
        check_range("rows", seats, limits.num_seats, "seat")
        check_live("rows", seats, after.live)
        check_distinct("rows", seats)
    starts = after.positions[seats]
    ends = starts + _num_tokens(step, len(seats), limits)
    if not len(step.num_tokens) and step.samples is None and not len(step.candidates):
        room = np.minimum(after.num_blocks[seats] * limits.block_size, limits.max_model_len)
        if not np.count_nonzero((ends != after.num_known[seats]) | (ends > room)):
            every = np.arange(len(seats))
            return StepRows(seats, starts, ends, every, seats, _NONE, _NONE, named=step.rows, is_decode=True)
    _check_ends(seats, starts, ends, after, limits)
    samples = _samples(step, seats, ends, after, limits)
    if not len(step.candidates):
        return StepRows(seats, starts, ends, *samples, _NONE, _NONE, named=step.rows)
    candidates = _candidates(step, seats, ends, after, limits)
    _check_apart(seats, samples, candidates[0])
    return StepRows(seats, starts, ends, *samples, *candidates, named=step.rows)


def _num_tokens(step: Step, num_rows: int, limits: StepLimits) -> IntArray | int:
    """Number of tokens that each row computes, [R], or one number for all rows."""
    if not len(step.num_tokens):
        num_tokens: IntArray | int = 1
        total = num_rows
    else:
        each = num_tokens = as_ids(step.num_tokens)
        if len(each) != num_rows:
            raise InvalidStepError(f"num_tokens has {len(each)} entries beside {num_rows} rows")
        refuse_where(each < 1, lambda i: f"num_tokens[{i}] is {each[i]}: a row computes at least 1 token")
        total = int(each.sum())
    if total > limits.max_batched_tokens:
        raise InvalidStepError(
            f"num_tokens are {total} together: one step computes at most {limits.max_batched_tokens}"
        )
    return num_tokens


def _check_ends(seats: IntArray, starts: IntArray, ends: IntArray, after: SeatCounts, limits: StepLimits) -> None:
    known = after.num_known[seats]
    held = after.num_blocks[seats] * limits.block_size
    refuse_where(
        ends > known,
        lambda i: f"rows[{i}]: seat {seats[i]} knows {known[i]} tokens and is to compute {starts[i]} to {ends[i]}",
    )
    refuse_where(
        ends > held,
        lambda i: f"rows[{i}]: seat {seats[i]} has blocks for {held[i]} tokens and computes up to {ends[i]}",
    )
    refuse_where(
        ends > limits.max_model_len,
        lambda i: f"rows[{i}]: seat {seats[i]} computes up to {ends[i]}, past the longest {limits.max_model_len}",
    )


def _samples(
    step: Step, seats: IntArray, ends: IntArray, after: SeatCounts, limits: StepLimits
) -> tuple[IntArray, IntArray]:
    """Rows and seats of the samples. Row and seat must both end at the last token that the worker knows."""
    if step.samples is None:
        _check_known("samples", "row of seat", seats, ends, after)
        return np.arange(len(seats)), seats
    pairs = as_pairs(step.samples)
    sample_rows, sample_seats = pairs[:, 0], pairs[:, 1]
    check_range("samples", sample_rows, len(seats), "row")
    check_range("samples", sample_seats, limits.num_seats, "seat")
    check_live("samples", sample_seats, after.live)
    check_distinct("samples (seats)", sample_seats)
    row_ends = ends[sample_rows]
    _check_known("samples", "row of seat", seats[sample_rows], row_ends, after)
    _check_known("samples", "seat", sample_seats, row_ends, after)
    return sample_rows, sample_seats


def _check_known(name: str, which: str, seats: IntArray, row_ends: IntArray, after: SeatCounts) -> None:
    """Raises InvalidStepError unless each of `seats` knows its tokens exactly up to the end of its row."""
    known = after.num_known[seats]
    refuse_where(
        known != row_ends,
        lambda i: f"{name}[{i}]: {which} {seats[i]} knows {known[i]} tokens, and the row ends at {row_ends[i]}",
    )


def _candidates(
    step: Step, seats: IntArray, ends: IntArray, after: SeatCounts, limits: StepLimits
) -> tuple[IntArray, IntArray]:
    """Rows to rank, each ending at the last token of its seat, and the number of next tokens to answer for each."""
    pairs = as_pairs(step.candidates)
    rows, counts = pairs[:, 0], pairs[:, 1]
    check_range("candidates", rows, len(seats), "row")
    check_distinct("candidates (rows)", rows)
    refuse_where(counts < 1, lambda i: f"candidates[{i}] asks for {counts[i]} tokens: a row answers at least 1")
    _check_known("candidates", "seat", seats[rows], ends[rows], after)
    return rows, np.minimum(counts, limits.vocab_size)


def _check_apart(seats: IntArray, samples: tuple[IntArray, IntArray], ranked_rows: IntArray) -> None:
    """Raises InvalidStepError if a ranked row is sampled, or if another row samples for its seat."""
    sample_rows, sample_seats = samples
    ranked_seats = seats[ranked_rows]
    refuse_where(
        np.isin(ranked_rows, sample_rows) | np.isin(ranked_seats, sample_seats),
        lambda i: (
            f"candidates[{i}]: row {ranked_rows[i]} is sampled too, or its seat {ranked_seats[i]} is: "
            "`samples` must name the other rows alone"
        ),
    )
