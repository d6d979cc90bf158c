"""Whether a step can be executed: every number in it against the slots as they would be by then.

Pure: it works on a copy of the slots' counts and changes nothing, so a step is taken whole or not at all. What it
gives back holds the step's arrays decoded, so that nobody reads the message twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.step import SlotState, Step
from worker_svc.sampling_check import check_sampling
from worker_svc.step_limits import InvalidStepError, StepLimits

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
BlockPairs = list[tuple[int, int]]


@dataclass(slots=True)
class SlotCounts:
    """How far each slot is; arrays [num_slots]."""

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

    def copy_slots(self, parents: IntArray, children: IntArray) -> None:
        for counts in (self.live, self.num_blocks, self.positions, self.num_known):
            counts[children] = counts[parents]


@dataclass(frozen=True, slots=True)
class Appended:
    """Blocks appended to block tables, beside each other."""

    slots: IntArray
    columns: IntArray  # of the block table
    blocks: IntArray


@dataclass(frozen=True, slots=True)
class Forks:
    """Slots that start as copies; all parents are read before any child is written."""

    parents: IntArray
    children: IntArray


@dataclass(frozen=True, slots=True)
class StepRows:
    """What to compute, R rows, and what to sample from it, S samples."""

    slots: IntArray  # [R]
    starts: IntArray  # [R] position of the first token
    ends: IntArray  # [R] position after the last token
    sample_rows: IntArray  # [S]
    sample_slots: IntArray  # [S]

    @property
    def num_tokens(self) -> IntArray:
        return self.ends - self.starts

    @property
    def sample_positions(self) -> IntArray:
        """Where the sampled tokens will stand, [S]."""
        return self.ends[self.sample_rows]


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A step that can be executed."""

    counts: SlotCounts  # once all but the rows is applied
    appended: Appended
    forks: Forks
    swap_out: BlockPairs  # (device block, host block)
    swap_in: BlockPairs  # (host block, device block)
    copies: BlockPairs  # (source block, destination block)
    rows: StepRows


def check_step(step: Step, counts: SlotCounts, limits: StepLimits) -> CheckedStep:
    """Raises InvalidStepError, naming field and index, at the first thing that cannot be."""
    after = counts.copy()
    _drop(step, after, limits)
    _place(step.whole, after, limits)
    return CheckedStep(
        counts=after,
        appended=_append(step, after, limits),
        forks=_fork(step, after, limits),
        swap_out=_moves("swap_out", step.swap_out, limits.num_blocks, limits.num_host_blocks),
        swap_in=_moves("swap_in", step.swap_in, limits.num_host_blocks, limits.num_blocks),
        copies=_moves("copies", step.copies, limits.num_blocks, limits.num_blocks),
        rows=_rows(step, after, limits),
    )


def _drop(step: Step, after: SlotCounts, limits: StepLimits) -> None:
    freed = _ints(step.freed_slots)
    _check_range("freed_slots", freed, limits.num_slots, "slot")
    if step.snapshot:
        after.live[:] = False
    else:
        _check_live("freed_slots", freed, after)
    after.live[freed] = False


def _place(states: Sequence[SlotState], after: SlotCounts, limits: StepLimits) -> None:
    _check_distinct("whole", _ints([state.slot for state in states]))
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
    _check_range(f"{where}.slot", _ints([state.slot]), limits.num_slots, "slot")
    _check_range(f"{where}.block_table", _ints(state.block_table), limits.num_blocks, "block")
    _check_range(f"{where}.token_ids", _ints(state.token_ids), limits.vocab_size, "token id")
    _check_range(f"{where}.history", _ints(state.history), limits.vocab_size, "token id")
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
    # Prompt log-probabilities look one token ahead, so a prompt that is to have them is known to its end.
    most = limits.max_model_len if state.sampling.num_prompt_logprobs is None else num_known
    if not 0 <= state.num_prompt_tokens <= most:
        raise InvalidStepError(f"{where}.num_prompt_tokens is {state.num_prompt_tokens}: it is from 0 to {most}")


def _append(step: Step, after: SlotCounts, limits: StepLimits) -> Appended:
    pairs = _pairs(step.append_pairs)
    slots, blocks = pairs[:, 0], pairs[:, 1]
    _check_range("append_pairs", slots, limits.num_slots, "slot")
    _check_range("append_pairs", blocks, limits.num_blocks, "block")
    _check_live("append_pairs", slots, after)
    columns = after.num_blocks[slots] + _occurrence(slots)
    np.add.at(after.num_blocks, slots, 1)
    _refuse_where(
        columns >= limits.max_blocks,
        lambda i: f"append_pairs[{i}]: slot {slots[i]} has {limits.max_blocks} blocks, which is the most",
    )
    return Appended(slots, columns, blocks)


def _fork(step: Step, after: SlotCounts, limits: StepLimits) -> Forks:
    pairs = _pairs(step.forks)
    parents, children = pairs[:, 0], pairs[:, 1]
    _check_range("forks", pairs.reshape(-1), limits.num_slots, "slot")
    _check_live("forks", parents, after)
    _check_distinct("forks (children)", children)
    after.copy_slots(parents, children)
    return Forks(parents, children)


def _moves(name: str, values: Sequence[int], num_sources: int, num_destinations: int) -> BlockPairs:
    if not len(values):
        return []
    pairs = _pairs(values)
    _check_range(f"{name} (sources)", pairs[:, 0], num_sources, "block")
    _check_range(f"{name} (destinations)", pairs[:, 1], num_destinations, "block")
    _check_distinct(f"{name} (destinations)", pairs[:, 1])
    return list(map(tuple, pairs.tolist()))


def _rows(step: Step, after: SlotCounts, limits: StepLimits) -> StepRows:
    slots = _ints(step.rows)
    num_tokens = _ints(step.num_tokens) if len(step.num_tokens) else np.ones(len(slots), dtype=np.int64)
    if len(num_tokens) != len(slots):
        raise InvalidStepError(f"num_tokens has {len(num_tokens)} entries beside {len(slots)} rows")
    _check_range("rows", slots, limits.num_slots, "slot")
    _check_live("rows", slots, after)
    _check_distinct("rows", slots)
    _refuse_where(num_tokens < 1, lambda i: f"num_tokens[{i}] is {num_tokens[i]}: a row computes at least 1 token")
    if num_tokens.sum() > limits.max_batched_tokens:
        raise InvalidStepError(
            f"num_tokens are {num_tokens.sum()} together: one step computes at most {limits.max_batched_tokens}"
        )
    starts = after.positions[slots]
    ends = starts + num_tokens
    _check_ends(slots, starts, ends, after, limits)
    return StepRows(slots, starts, ends, *_samples(step, slots, ends, after, limits))


def _check_ends(slots: IntArray, starts: IntArray, ends: IntArray, after: SlotCounts, limits: StepLimits) -> None:
    known = after.num_known[slots]
    held = after.num_blocks[slots] * limits.block_size
    _refuse_where(
        ends > known,
        lambda i: f"rows[{i}]: slot {slots[i]} knows {known[i]} tokens and is to compute {starts[i]} to {ends[i]}",
    )
    _refuse_where(
        ends > held,
        lambda i: f"rows[{i}]: slot {slots[i]} has blocks for {held[i]} tokens and computes up to {ends[i]}",
    )
    _refuse_where(
        ends > limits.max_model_len,
        lambda i: f"rows[{i}]: slot {slots[i]} computes up to {ends[i]}, past the longest {limits.max_model_len}",
    )


def _samples(
    step: Step, slots: IntArray, ends: IntArray, after: SlotCounts, limits: StepLimits
) -> tuple[IntArray, IntArray]:
    """Rows and slots of the samples. Both the row and the slot must stand at the end of what they know."""
    if step.samples is None:
        sample_rows, sample_slots = np.arange(len(slots)), slots
    else:
        pairs = _pairs(step.samples)
        sample_rows, sample_slots = pairs[:, 0], pairs[:, 1]
        _check_range("samples", sample_rows, len(slots), "row")
        _check_range("samples", sample_slots, limits.num_slots, "slot")
        _check_live("samples", sample_slots, after)
        _check_distinct("samples (slots)", sample_slots)
    row_slots, row_ends = slots[sample_rows], ends[sample_rows]
    for which, sampled in (("row of slot", row_slots), ("slot", sample_slots)):
        known = after.num_known[sampled]
        _refuse_where(
            known != row_ends,
            lambda i, which=which, sampled=sampled, known=known: (  # type: ignore[misc]
                f"samples[{i}]: {which} {sampled[i]} knows {known[i]} tokens, and the row ends at {row_ends[i]}"
            ),
        )
    return sample_rows, sample_slots


def _ints(values: Sequence[int]) -> IntArray:
    return np.asarray(values, dtype=np.int64)


def _pairs(values: Sequence[int]) -> IntArray:
    return _ints(values).reshape(-1, 2)


def _occurrence(values: IntArray) -> IntArray:
    """For each value, how many equal ones stand before it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.searchsorted(ordered, ordered, side="left")
    occurrence = np.empty_like(values)
    occurrence[order] = np.arange(len(values)) - first
    return occurrence


def _refuse_where(bad: BoolArray, message: Callable[[int], str]) -> None:
    if bad.any():
        raise InvalidStepError(message(int(bad.argmax())))


def _check_range(name: str, values: IntArray, limit: int, kind: str) -> None:
    if len(values) and not 0 <= values.min() <= values.max() < limit:
        bad = values[(values < 0) | (values >= limit)][0]
        raise InvalidStepError(f"{name} names {kind} {bad}: there are {limit}, counted from 0")


def _check_live(name: str, slots: IntArray, after: SlotCounts) -> None:
    _refuse_where(~after.live[slots], lambda i: f"{name}[{i}] names slot {slots[i]}, which is not in use")


def _check_distinct(name: str, values: IntArray) -> None:
    ordered = np.sort(values)
    _refuse_where(ordered[1:] == ordered[:-1], lambda i: f"{name} names {ordered[i]} twice")
