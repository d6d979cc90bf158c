"""Moves whole blocks for steps: copy-on-write on the main stream, swaps and fetched blocks on a side stream.

The host never waits to launch a step, and the main stream waits for a swap only if a step touches its blocks
(`move_hazards`, for which a fetched block that is placed is one swapped in). Owns the side stream; host blocks are read
and written there alone.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.blocks.copy_order import apart, copy_table
from worker_svc.gpu.move_hazards import NUM_REMEMBERED, MovePlan, OutstandingMoves, blocks_of
from worker_svc.memory.kv_pool import KVPool
from worker_svc.operations import CopyByTable, SwapBlocks
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import BlockPairs, CheckedStep, IntArray, StepRows
from worker_svc.steps.step_upload import StepUpload
from worker_svc.steps.streams import DeviceEvent, DeviceStreams


@dataclass(frozen=True, slots=True)
class PackedMoves:
    """A step's moves; the table of its copies is sent in the step's upload."""

    swap_out: BlockPairs  # (device block, host block)
    placed: BlockPairs  # (fetched block, device block)
    swap_in: BlockPairs  # (host block, device block)
    copies: BlockPairs  # (source block, destination block)
    copy_table: Tensor | None  # int64, on the device, as `copy_table` lays it out
    num_copy_groups: int


@dataclass(frozen=True, slots=True)
class PendingSwaps:
    """A step's swaps, and blocks that it places, in flight, or none. Any thread may wait for them."""

    began: DeviceEvent | None
    ended: DeviceEvent | None

    def wait(self) -> int:
        """Waits on the host; returns the nanoseconds that the swaps took, at least 1, or 0 if there were none.

        The time is that of the side stream alone, whatever was computed meanwhile.
        """
        if self.began is None or self.ended is None:
            return 0
        self.ended.synchronize()
        return max(1, self.ended.nanoseconds_since(self.began))


NO_SWAPS = PendingSwaps(None, None)


class BlockMover:
    """Moves the blocks of one pool. Used by the execution thread alone, with the main stream current.

    For each step: `pack`, the upload's `send`, `launch`, then the computation of its rows. No other code may write the
    pool's blocks on another stream, or read host blocks.
    """

    def __init__(
        self,
        kv_pool: KVPool,
        copy_by_table: CopyByTable,
        swap_blocks: SwapBlocks,
        streams: DeviceStreams | None = None,
    ) -> None:
        """`streams` are those of the pool's device unless given."""
        self._kv_pool = kv_pool
        self._streams = streams or DeviceStreams(kv_pool.device)
        self._copy_by_table = copy_by_table
        self._swap_blocks = swap_blocks
        self._side = self._streams.side_stream()
        self._outstanding = OutstandingMoves(kv_pool.num_blocks)
        # Events before the last steps on the main stream, by step modulo their number; as many as are still needed.
        self._main_points = [self._streams.event() for _ in range(NUM_REMEMBERED + 1)]
        self._swap_points: dict[int, DeviceEvent] = {}  # by swap

    def warm_up(self) -> None:
        """Copies a block onto itself, which compiles the kernel that moves blocks."""
        array, num_groups = apart(np.zeros((1, 2), dtype=np.int64))
        pool = self._kv_pool.blocks
        self._copy_by_table(pool, pool, torch.from_numpy(array).to(pool.device), num_groups)

    def pack(self, upload: StepUpload, checked: CheckedStep, placed: BlockPairs) -> PackedMoves:
        """Adds the table of copies to the step's upload, between its `begin` and `send`.

        placed: (fetched block, device block)
        """
        table, num_groups = None, 0
        if checked.copies:
            array, num_groups = copy_table(_as_array(checked.copies))
            table = upload.add(array)
        return PackedMoves(checked.swap_out, placed, checked.swap_in, checked.copies, table, num_groups)

    def launch(self, packed: PackedMoves, table: SeatTable, rows: StepRows) -> PendingSwaps:
        """Queues swaps out, placed blocks, swaps in, and copies, in this order.

        table: the seats as the step's rows read them. After this call, work on the current stream runs after all moves
        of blocks that the step's rows touch.
        """
        written = [*packed.placed, *packed.swap_in]
        has_swaps = bool(packed.swap_out or written)
        blocks = None
        if has_swaps or self._outstanding.is_watching:
            self._forget_done_swaps()
            blocks = blocks_of(table.block_tables, table.limits.block_size, rows, packed.copies)
        plan = self._outstanding.plan(packed.swap_out, written, blocks)
        if blocks is not None:
            self._main_point(plan.step).record()
        try:
            swaps = self._swap(packed, plan) if has_swaps else NO_SWAPS
        except BaseException:  # such as short memory: the step fails, and others follow
            self._abandon_swaps()
            raise
        if plan.main_after is not None:
            self._swap_points[plan.main_after].hold_stream()
        if packed.copy_table is not None:
            pool = self._kv_pool.blocks
            self._copy_by_table(pool, pool, packed.copy_table, packed.num_copy_groups)
        return swaps

    def _swap(self, packed: PackedMoves, plan: MovePlan) -> PendingSwaps:
        assert plan.side_after is not None
        device_blocks, host_blocks = self._kv_pool.blocks, self._kv_pool.host_blocks
        fetched_blocks = self._kv_pool.fetched_blocks
        began, ended = self._streams.event(timed=True), self._streams.event(timed=True)
        with self._side.current():
            self._main_point(plan.side_after).hold_stream()
            began.record()
            if plan.swap_out is not None:
                self._swap_blocks(device_blocks, host_blocks, torch.from_numpy(_as_array(packed.swap_out)))
                self._record_swap(plan.swap_out)
            if plan.swap_in is not None:
                for source, pairs in ((fetched_blocks, packed.placed), (host_blocks, packed.swap_in)):
                    if pairs:
                        self._swap_blocks(source, device_blocks, torch.from_numpy(_as_array(pairs)))
                self._record_swap(plan.swap_in)
            ended.record()
        return PendingSwaps(began, ended)

    def _abandon_swaps(self) -> None:
        """Has the main stream wait for all swaps that were queued, so that none is outstanding."""
        queued = self._streams.event()
        with self._side.current():
            queued.record()
        queued.hold_stream()
        if (newest := self._outstanding.newest_swap) is not None:
            self._outstanding.mark_done(newest)
        self._swap_points.clear()

    def _record_swap(self, swap: int) -> None:
        self._swap_points[swap] = self._streams.event()
        self._swap_points[swap].record()

    def _main_point(self, step: int) -> DeviceEvent:
        return self._main_points[step % len(self._main_points)]

    def _forget_done_swaps(self) -> None:
        newest = self._outstanding.newest_swap
        if newest is None:
            self._swap_points.clear()
        elif self._swap_points[newest].is_reached():
            self._outstanding.mark_done(newest)
            self._swap_points.clear()


def _as_array(pairs: BlockPairs) -> IntArray:
    return np.array(pairs, dtype=np.int64)
