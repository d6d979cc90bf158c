"""Which of two streams must wait for the other, where one swaps blocks while the other computes.

The main stream does each step's copies and forward pass, the side stream all swaps, each in order. Pure: numbers of
steps, of swaps and of blocks come in and go out; who records and waits for events is `block_moves`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker_svc.steps.step_check import BlockPairs, IntArray, StepRows

NUM_REMEMBERED = 2  # steps before the one being launched that the main stream may still be at
WATCHED_STEPS = 64  # after a swap; then steps are no longer looked at until the next


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """Device blocks that the main stream reads and writes for one step."""

    written: IntArray  # [W], by copies and by rows
    copied: IntArray  # [P], sources
    tables: npt.NDArray[np.int32]  # [R, widest], of the rows, as the step found them
    num_read: IntArray  # [R], leading blocks of each table

    def touched(self) -> IntArray:
        """All of them, some several times."""
        m_read = np.arange(self.tables.shape[1]) < self.num_read[:, None]
        return np.concatenate([self.tables[m_read], self.copied, self.written])


def blocks_of(block_tables: npt.NDArray[np.int32], block_size: int, rows: StepRows, copies: BlockPairs) -> StepBlocks:
    """`block_tables` [num_slots, max_blocks] as they are while the step runs; it is read now."""
    first = rows.starts // block_size
    num_read = -(-rows.ends // block_size)
    num_written = num_read - first
    row_of = np.repeat(np.arange(len(first)), num_written)
    before = np.cumsum(num_written) - num_written
    columns = first[row_of] + np.arange(len(row_of)) - before[row_of]
    pairs = np.array(copies, dtype=np.int64).reshape(-1, 2)
    return StepBlocks(
        written=np.concatenate([block_tables[rows.slots[row_of], columns], pairs[:, 1]]),
        copied=pairs[:, 0],
        tables=block_tables[rows.slots, : num_read.max(initial=0)],
        num_read=num_read,
    )


@dataclass(frozen=True, slots=True)
class MovePlan:
    """What one step's streams wait for. The swap-out comes before the swap-in, both before what the main stream does.

    Steps count from 1, and swaps, a step's two directions apart.
    """

    step: int
    side_after: int | None  # the side stream waits until the main one has done all steps before this one
    swap_out: int | None  # number of this step's swap-out, if it has one
    swap_in: int | None
    main_after: int | None  # the main stream waits until the side one has done this swap and all before it


class OutstandingMoves:
    """Swaps that may still run, and the steps that may; asked once for each step, in order."""

    def __init__(self, num_blocks: int, watched_steps: int = WATCHED_STEPS) -> None:
        self._watched_steps = watched_steps
        self._step = 0
        self._last_step_with_swaps = -watched_steps
        self._newest_swap = 0
        self._passed_swap = 0  # the main stream is behind it, or it is done
        self._read_by = np.zeros(num_blocks, dtype=np.int64)  # the newest swap-out that reads a block
        self._written_by = np.zeros(num_blocks, dtype=np.int64)  # the newest swap-in that writes a block
        self._steps: deque[tuple[int, StepBlocks]] = deque(maxlen=NUM_REMEMBERED)

    @property
    def newest_swap(self) -> int | None:
        """The last swap, unless the main stream need not wait for it any more."""
        return self._newest_swap if self._newest_swap > self._passed_swap else None

    @property
    def is_watching(self) -> bool:
        """Whether `plan` must be told what the next step touches, though it may have no swaps."""
        recent = self._step - self._last_step_with_swaps < self._watched_steps
        return recent or self.newest_swap is not None

    def passed(self, swap: int) -> None:
        """This swap is done, and with it all before it."""
        self._passed_swap = max(self._passed_swap, swap)

    def plan(self, swap_out: BlockPairs, swap_in: BlockPairs, blocks: StepBlocks | None) -> MovePlan:
        """The next step: what it swaps, and what the main stream touches, None only where nobody `is_watching`."""
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
        """A swap-out waits for who writes its blocks, a swap-in for who reads its blocks too."""
        after = self._step
        for step, blocks in reversed(self._steps):
            if np.isin(blocks.written, saved).any() or np.isin(blocks.touched(), restored).any():
                break
            after = step
        return after

    def _main_after(self, blocks: StepBlocks) -> int | None:
        """A step waits for swap-outs of blocks that it writes, and for swap-ins of blocks that it touches at all."""
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
