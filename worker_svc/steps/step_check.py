"""Checks that a step can be executed: every number in it, against the slots as the step itself changes them.

Pure: changes a copy of the slots' counts, or copies nothing if the step changes none, so a step is applied as a whole
or not at all. The result holds the step's arrays decoded, so that the message is decoded once.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.step import SlotState, Step
from worker_svc.steps.array_checks import (
    as_ids,
    as_pairs,
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
_NONE: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class SlotCounts:
    """Progress of each slot; arrays [num_slots]."""

    live: BoolArray
    num_blocks: IntArray  # in the block table
    positions: IntArray  # tokens whose keys and values are in the blocks
    num_known: IntArray  # tokens that the worker knows, computed or not

    @classmethod
    def empty(cls, num_slots: int) -> "SlotCounts":
        zeros = [np.zeros(num_slots, dtype=np.int64) for _ in range(3)]
        return cls(np.zeros(num_slots, dtype=np.bool_), *zeros)

    def copy(self) -> "SlotCounts":
        return SlotCounts(self.live.copy(), self.num_blocks.copy(), self.positions.copy(), self.num_known.copy())


@dataclass(frozen=True, slots=True)
class Appended:
    """Blocks appended to block tables: three arrays of equal length."""

    slots: IntArray
    columns: IntArray  # of the block table
    blocks: IntArray


# Most steps only compute. Arrays that they leave empty are not checked, since the device is idle meanwhile.
_NOTHING_APPENDED = Appended(_NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class StepRows:
    """R rows to compute, S samples to draw from them, and C rows to rank, from which no sample is drawn."""

    slots: IntArray  # [R]
    starts: IntArray  # [R] position of the first token
    ends: IntArray  # [R] position after the last token
    sample_rows: IntArray  # [S]
    sample_slots: IntArray  # [S]
    candidate_rows: IntArray  # [C]
    candidate_counts: IntArray  # [C] how many next tokens, at most the vocabulary
    named: Sequence[int] = ()  # slots, in the step's own array
    is_decode: bool = False  # one token a row, and each row samples for its own slot

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

    counts: SlotCounts  # after the step, but before its rows
    appended: Appended
    swap_out: BlockPairs  # (device block, host block)
    swap_in: BlockPairs  # (host block, device block)
    copies: BlockPairs  # (source block, destination block)
    rows: StepRows


def check_step(step: Step, counts: SlotCounts, limits: StepLimits, rows_before: StepRows | None = None) -> CheckedStep:
    """Raises InvalidStepError, with field and index, at the first entry that is invalid.

    `rows_before`: rows of the last applied step; the slots of equal rows are not checked again.
    """
    changes_slots = bool(len(step.freed_slots) or step.snapshot or step.whole)
    after = counts.copy() if changes_slots or len(step.append_pairs) else counts
    _drop(step, after, limits)
    _place(step.whole, after, limits)
    return CheckedStep(
        counts=after,
        appended=_append(step, after, limits),
        swap_out=_moves("swap_out", step.swap_out, limits.num_blocks, limits.num_host_blocks),
        swap_in=_moves("swap_in", step.swap_in, limits.num_host_blocks, limits.num_blocks),
        copies=_moves("copies", step.copies, limits.num_blocks, limits.num_blocks),
        rows=_rows(step, after, limits, None if changes_slots else rows_before),
    )


def _drop(step: Step, after: SlotCounts, limits: StepLimits) -> None:
    if not len(step.freed_slots) and not step.snapshot:
        return
    freed = as_ids(step.freed_slots)
    check_range("freed_slots", freed, limits.num_slots, "slot")
    if step.snapshot:
        after.live[:] = False
    else:
        check_live("freed_slots", freed, after.live)
    after.live[freed] = False


def _place(states: Sequence[SlotState], after: SlotCounts, limits: StepLimits) -> None:
    if not states:
        return
    check_distinct("whole", as_ids([state.slot for state in states]))
    for index, state in enumerate(states):
        where = f"whole[{index}]"
        _check_state(where, state, limits)
        check_sampling(f"{where}.sampling", state.sampling, limits.vocab_size)
        after.live[state.slot] = True
        after.num_blocks[state.slot] = len(state.block_table)
        after.positions[state.slot] = state.position
        after.num_known[state.slot] = state.position + len(state.token_ids)


def _check_state(where: str, state: SlotState, limits: StepLimits) -> None:
    num_known = state.position + len(state.token_ids)
    check_range(f"{where}.slot", as_ids([state.slot]), limits.num_slots, "slot")
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
            f"{where}.history has {len(state.history)} tokens: with penalties it holds all "
            f"{state.position} before position"
        )
    # A prompt log-probability needs the next token, so a prompt that asks for them must be known to its end.
    most = limits.max_model_len if state.sampling.num_prompt_logprobs is None else num_known
    if not 0 <= state.num_prompt_tokens <= most:
        raise InvalidStepError(f"{where}.num_prompt_tokens is {state.num_prompt_tokens}: it is from 0 to {most}")


def _append(step: Step, after: SlotCounts, limits: StepLimits) -> Appended:
    if not len(step.append_pairs):
        return _NOTHING_APPENDED
    pairs = as_pairs(step.append_pairs)
    slots, blocks = pairs[:, 0], pairs[:, 1]
    check_range("append_pairs", slots, limits.num_slots, "slot")
    check_range("append_pairs", blocks, limits.num_blocks, "block")
    check_live("append_pairs", slots, after.live)
    columns = after.num_blocks[slots] + count_earlier_equals(slots)
    after.num_blocks[slots] = columns + 1  # for a slot that is named twice, the last value counts
    refuse_where(
        columns >= limits.max_blocks,
        lambda i: f"append_pairs[{i}]: slot {slots[i]} has {limits.max_blocks} blocks, which is the most",
    )
    return Appended(slots, columns, blocks)


def _moves(name: str, values: Sequence[int], num_sources: int, num_destinations: int) -> BlockPairs:
    if not len(values):
        return []
    pairs = as_pairs(values)
    check_range(f"{name} (sources)", pairs[:, 0], num_sources, "block")
    check_range(f"{name} (destinations)", pairs[:, 1], num_destinations, "block")
    check_distinct(f"{name} (destinations)", pairs[:, 1])
    return list(map(tuple, pairs.tolist()))


def _rows(step: Step, after: SlotCounts, limits: StepLimits, before: StepRows | None) -> StepRows:
    """Decode and check the rows. `before`: rows whose slots are still in use, or None."""
    if before is not None and isinstance(step.rows, array) and step.rows == before.named:
        slots = before.slots
    else:
        slots = as_ids(step.rows)
        check_range("rows", slots, limits.num_slots, "slot")
        check_live("rows", slots, after.live)
        check_distinct("rows", slots)
    starts = after.positions[slots]
    ends = starts + _num_tokens(step, len(slots), limits)
    if not len(step.num_tokens) and step.samples is None and not len(step.candidates):
        room = np.minimum(after.num_blocks[slots] * limits.block_size, limits.max_model_len)
        if not np.count_nonzero((ends != after.num_known[slots]) | (ends > room)):
            every = np.arange(len(slots))
            return StepRows(slots, starts, ends, every, slots, _NONE, _NONE, named=step.rows, is_decode=True)
    _check_ends(slots, starts, ends, after, limits)
    samples = _samples(step, slots, ends, after, limits)
    if not len(step.candidates):
        return StepRows(slots, starts, ends, *samples, _NONE, _NONE, named=step.rows)
    candidates = _candidates(step, slots, ends, after, limits)
    _check_apart(slots, samples, candidates[0])
    return StepRows(slots, starts, ends, *samples, *candidates, named=step.rows)


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


def _check_ends(slots: IntArray, starts: IntArray, ends: IntArray, after: SlotCounts, limits: StepLimits) -> None:
    known = after.num_known[slots]
    held = after.num_blocks[slots] * limits.block_size
    refuse_where(
        ends > known,
        lambda i: f"rows[{i}]: slot {slots[i]} knows {known[i]} tokens and is to compute {starts[i]} to {ends[i]}",
    )
    refuse_where(
        ends > held,
        lambda i: f"rows[{i}]: slot {slots[i]} has blocks for {held[i]} tokens and computes up to {ends[i]}",
    )
    refuse_where(
        ends > limits.max_model_len,
        lambda i: f"rows[{i}]: slot {slots[i]} computes up to {ends[i]}, past the longest {limits.max_model_len}",
    )


def _samples(
    step: Step, slots: IntArray, ends: IntArray, after: SlotCounts, limits: StepLimits
) -> tuple[IntArray, IntArray]:
    """Rows and slots of the samples. Row and slot must both end at the last token that the worker knows."""
    if step.samples is None:
        _check_known("row of slot", slots, ends, after)
        return np.arange(len(slots)), slots
    pairs = as_pairs(step.samples)
    sample_rows, sample_slots = pairs[:, 0], pairs[:, 1]
    check_range("samples", sample_rows, len(slots), "row")
    check_range("samples", sample_slots, limits.num_slots, "slot")
    check_live("samples", sample_slots, after.live)
    check_distinct("samples (slots)", sample_slots)
    row_ends = ends[sample_rows]
    _check_known("row of slot", slots[sample_rows], row_ends, after)
    _check_known("slot", sample_slots, row_ends, after)
    return sample_rows, sample_slots


def _check_known(which: str, sampled: IntArray, row_ends: IntArray, after: SlotCounts) -> None:
    """Raises InvalidStepError unless each slot in `sampled` knows its tokens exactly up to the end of its row."""
    known = after.num_known[sampled]
    refuse_where(
        known != row_ends,
        lambda i: f"samples[{i}]: {which} {sampled[i]} knows {known[i]} tokens, and the row ends at {row_ends[i]}",
    )


def _candidates(
    step: Step, slots: IntArray, ends: IntArray, after: SlotCounts, limits: StepLimits
) -> tuple[IntArray, IntArray]:
    """Rows to rank, each ending at the last token of its slot, and the number of next tokens to answer for each."""
    pairs = as_pairs(step.candidates)
    rows, counts = pairs[:, 0], pairs[:, 1]
    check_range("candidates", rows, len(slots), "row")
    check_distinct("candidates (rows)", rows)
    refuse_where(counts < 1, lambda i: f"candidates[{i}] asks for {counts[i]} tokens: a row answers at least 1")
    ranked, row_ends = slots[rows], ends[rows]
    known = after.num_known[ranked]
    refuse_where(
        known != row_ends,
        lambda i: f"candidates[{i}]: slot {ranked[i]} knows {known[i]} tokens, and the row ends at {row_ends[i]}",
    )
    return rows, np.minimum(counts, limits.vocab_size)


def _check_apart(slots: IntArray, samples: tuple[IntArray, IntArray], ranked_rows: IntArray) -> None:
    """Raises InvalidStepError if a ranked row is sampled, or if another row samples for its slot."""
    sample_rows, sample_slots = samples
    ranked_slots = slots[ranked_rows]
    refuse_where(
        np.isin(ranked_rows, sample_rows) | np.isin(ranked_slots, sample_slots),
        lambda i: (
            f"candidates[{i}]: row {ranked_rows[i]} is sampled too, or its slot {ranked_slots[i]} is: "
            "`samples` must name the other rows alone"
        ),
    )
