"""Decides when a stream that swaps blocks and a stream that computes must wait for each other.

The main stream runs each step's copies and forward pass, the side stream all swaps, each in order. Pure: works with the
numbers of steps, swaps and blocks; `block_moves` records events and waits for them. Fetched blocks that a step places
are among its swaps in: both write device blocks from main memory.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker_svc.steps.step_check import BlockPairs, IntArray, StepRows

NUM_REMEMBERED = 2  # steps before the one being launched that the main stream may still execute
WATCHED_STEPS = 64  # steps after a swap whose blocks are recorded


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """Device blocks that the main stream reads and writes for one step."""

    written: IntArray  # [W], by copies and by rows
    copied: IntArray  # [P], sources
    tables: npt.NDArray[np.int32]  # [R, widest], of the rows, as they were at the step
    num_read: IntArray  # [R], leading blocks of each table

    def touched(self) -> IntArray:
        """Blocks that are read or written, some several times."""
        m_read = np.arange(self.tables.shape[1]) < self.num_read[:, None]
        return np.concatenate([self.tables[m_read], self.copied, self.written])


def blocks_of(block_tables: npt.NDArray[np.int32], block_size: int, rows: StepRows, copies: BlockPairs) -> StepBlocks:
    """Blocks of a step. block_tables: [num_seats, max_blocks] as they are at the step; they are read in this call."""
    first = rows.starts // block_size
    num_read = -(-rows.ends // block_size)
    num_written = num_read - first
    row_of = np.repeat(np.arange(len(first)), num_written)
    before = np.cumsum(num_written) - num_written
    columns = first[row_of] + np.arange(len(row_of)) - before[row_of]
    pairs = np.array(copies, dtype=np.int64).reshape(-1, 2)
    return StepBlocks(
        written=np.concatenate([block_tables[rows.seats[row_of], columns], pairs[:, 1]]),
        copied=pairs[:, 0],
        tables=block_tables[rows.seats, : num_read.max(initial=0)],
        num_read=num_read,
    )


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Waits of one step's streams. The swap-out precedes the swap-in, and both precede the step on the main stream.

    Steps are numbered from 1, and so are swaps, a step's swap-out and swap-in separately.
    """

    step: int
    side_after: int | None  # the side stream waits until the main one has executed all steps before this one
    swap_out: int | None  # number of this step's swap-out, if it has one
    swap_in: int | None
    main_after: int | None  # the main stream waits until the side one has executed this swap and all before it


class OutstandingMoves:
    """Swaps and steps that may still run. `plan` is called once for each step, in order."""

    def __init__(self, num_blocks: int, watched_steps: int = WATCHED_STEPS) -> None:
        self._watched_steps = watched_steps
        self._step = 0
        self._last_step_with_swaps = -watched_steps
        self._newest_swap = 0
        self._passed_swap = 0  # the main stream has waited for it, or it is finished
        self._read_by = np.zeros(num_blocks, dtype=np.int64)  # the newest swap-out that reads a block
        self._written_by = np.zeros(num_blocks, dtype=np.int64)  # the newest swap-in that writes a block
        self._steps: deque[tuple[int, StepBlocks]] = deque(maxlen=NUM_REMEMBERED)

    @property
    def newest_swap(self) -> int | None:
        """The last swap; None if the main stream need not wait for it any more."""
        return self._newest_swap if self._newest_swap > self._passed_swap else None

    @property
    def is_watching(self) -> bool:
        """True if `plan` needs the blocks of the next step even if that has no swaps."""
        recent = self._step - self._last_step_with_swaps < self._watched_steps
        return recent or self.newest_swap is not None

    def mark_done(self, swap: int) -> None:
        """Record that this swap and all before it are finished."""
        self._passed_swap = max(self._passed_swap, swap)

    def plan(self, swap_out: BlockPairs, swap_in: BlockPairs, blocks: StepBlocks | None) -> MovePlan:
        """Plan the next step. blocks: those that the main stream touches; None only without swaps and `is_watching`."""
        self._step += 1
        step, side_after = self._step, None
        saved = [device_block for device_block, _ in swap_out]
        restored = [device_block for _, device_block in swap_in]
        if saved or restored:
            assert blocks is not None
            self._last_step_with_swaps = step
            side_after = self._side_after(saved, restored)
        out_swap = self._number(self._read_by, saved)
        in_swap = self._number(self._written_by, restored)
        main_after = None
        if blocks is None:
            assert self.newest_swap is None
            self._steps.clear()
        else:
            main_after = self._main_after(blocks)
            self._steps.append((step, blocks))
        return MovePlan(step, side_after, out_swap, in_swap, main_after)

    def _side_after(self, saved: Sequence[int], restored: Sequence[int]) -> int:
        """First step that the side stream need not wait for.

        A swap-out waits for steps that write its blocks, a swap-in for steps that read or write them.
        """
        after = self._step
        for step, blocks in reversed(self._steps):
            if np.isin(blocks.written, saved).any() or np.isin(blocks.touched(), restored).any():
                break
            after = step
        return after

    def _main_after(self, blocks: StepBlocks) -> int | None:
        """Swap that a step waits for: swap-outs of blocks that it writes, and swap-ins of blocks that it touches."""
        if self.newest_swap is None:
            return None
        reading = self._read_by[blocks.written].max(initial=0)
        writing = self._written_by[blocks.touched()].max(initial=0)
        swap = int(max(reading, writing))
        if swap <= self._passed_swap:
            return None
        self._passed_swap = swap
        return swap

    def _number(self, latest: IntArray, device_blocks: Sequence[int]) -> int | None:
        if not device_blocks:
            return None
        self._newest_swap += 1
        latest[device_blocks] = self._newest_swap
        return self._newest_swap
