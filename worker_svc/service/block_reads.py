"""Blocks of this worker for others: copies and sends them frame by frame, beside the steps.

Whoever holds the read key may read. Knows nothing of incarnations, which are the servicer's.
"""

from collections.abc import AsyncGenerator, Sequence
from functools import partial

from common.arrays import unpack_int32
from common.block_reads import make_frame
from quire.errors import FailedPreconditionError, InvalidRequestError
from quire.v1 import worker_pb2 as pb
from worker_svc.loaded_model import TravellingBlocks
from worker_svc.steps.step_progress import StepCount, StepProgress
from worker_svc.steps.task_thread import TaskThread


class BlockReads:
    """The reads of one worker. `thread` copies for one read at a time, a frame of each in turn."""

    def __init__(self, travel: TravellingBlocks, progress: StepProgress, thread: TaskThread) -> None:
        self._format = travel.format
        self._reader = travel.reader
        self._progress = progress
        self._thread = thread

    async def frames(self, request: pb.ReadBlocksRequest) -> AsyncGenerator[bytes]:
        """Yield all frames. Raises FailedPreconditionError or InvalidRequestError.

        A frame is yielded only if no step could have written its blocks before they were copied.
        """
        if request.block_format != self._format:
            raise FailedPreconditionError(f"this worker stores blocks as {self._format}, not {request.block_format}")
        block_ids = parse_block_ids(request.block_ids, self._reader.num_blocks)
        count = self._progress.count
        self._check_count(count, request.epoch)
        for first in range(0, len(block_ids), self._reader.most_blocks):
            some = block_ids[first : first + self._reader.most_blocks]
            frame = await self._thread.call(partial(self._frame, first, some))
            self._check_count(count, request.epoch)
            yield frame

    def _check_count(self, count: StepCount, epoch: int) -> None:
        """Raises FailedPreconditionError."""
        if count.epoch != epoch or not self._progress.is_current(count):
            raise FailedPreconditionError(f"this worker does not execute the steps of epoch {epoch} that were meant")

    def _frame(self, first: int, block_ids: Sequence[int]) -> bytes:
        return make_frame(first, self._reader.read(block_ids))


def parse_block_ids(data: bytes, num_blocks: int) -> list[int]:
    """Ids of blocks of a pool. Raises InvalidRequestError."""
    try:
        block_ids = unpack_int32(data).tolist()
    except ValueError as error:
        raise InvalidRequestError(f"block_ids: {error}") from None
    if not block_ids or not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise InvalidRequestError(f"block_ids: give at least one, each from 0 to {num_blocks - 1}")
    return block_ids
