"""Pool of a simulated worker: each slot holds a checksum of the context up to its token.

So a token can depend on its context as a model's does: who reads a wrong block goes on with other tokens. Its blocks
travel between workers, are swapped and copied like those of a model. Knows no costs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from common.block_reads import FRAME_BYTES
from worker_svc.loaded_model import TravellingBlocks
from worker_svc.steps.fetched_blocks import FetchedBlocks
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import BlockPairs, CheckedStep, IntArray, StepRows
from worker_svc.steps.step_limits import StepLimits

Checksums = npt.NDArray[np.uint64]

_SLOT_BYTES = 8
_FACTOR = 6_364_136_223_846_793_005  # odd, so that its powers do not vanish modulo 2**64
_MIX = np.uint64(11_400_714_819_323_198_485)


def bytes_per_block(block_size: int) -> int:
    """Size of a block's checksums."""
    return block_size * _SLOT_BYTES


class SimulatedContexts:
    """Blocks of checksums on the device, on the host, and from other workers. A `BlockReader`."""

    def __init__(self, limits: StepLimits, num_fetched_blocks: int) -> None:
        size = limits.block_size
        self.num_blocks = limits.num_blocks
        self.most_blocks = max(1, FRAME_BYTES // bytes_per_block(size))
        self._blocks = np.zeros((limits.num_blocks, size), dtype=np.uint64)
        self._host_blocks = np.zeros((limits.num_host_blocks, size), dtype=np.uint64)
        self._fetched_blocks = np.zeros((num_fetched_blocks, size), dtype=np.uint64)
        self.fetched = FetchedBlocks(self._fetched_blocks.view(np.uint8))
        self._powers = np.full(limits.max_model_len, _FACTOR, dtype=np.uint64).cumprod(dtype=np.uint64)

    def travel(self, format: str) -> TravellingBlocks:
        """Ways of the blocks to other workers with this format, and from them."""
        return TravellingBlocks(format, self, self.fetched)

    def read(self, block_ids: Sequence[int]) -> memoryview:
        """See BlockReader.read."""
        return self._blocks[list(block_ids)].view(np.uint8).reshape(-1).data

    def move(self, checked: CheckedStep, placed: BlockPairs) -> None:
        """Move blocks as a step says. placed: (fetched block, device block), which are free afterwards."""
        _copy(checked.swap_out, self._blocks, self._host_blocks)
        _copy(placed, self._fetched_blocks, self._blocks)
        self.fetched.release(placed)
        _copy(checked.swap_in, self._host_blocks, self._blocks)
        _copy(checked.copies, self._blocks, self._blocks)

    def compute(self, seats: SeatTable, rows: StepRows) -> Checksums:
        """Write the checksums of the rows' tokens. Returns that of the last token of each row."""
        size = seats.limits.block_size
        last = np.zeros(len(rows.seats), dtype=np.uint64)
        for row, (seat, start, end) in enumerate(zip(rows.seats, rows.starts, rows.ends, strict=True)):
            table, positions = seats.block_tables[seat], np.arange(start, end)
            before = self._blocks[table[(start - 1) // size], (start - 1) % size] if start else np.uint64(0)
            terms = (seats.token_ids[seat, start:end].astype(np.uint64) + np.uint64(1)) * self._powers[start:end]
            sums = before + terms.cumsum(dtype=np.uint64)
            self._blocks[table[positions // size], positions % size] = sums
            last[row] = sums[-1]
        return last


def tokens_of_contexts(last: Checksums, seats: SeatTable, rows: StepRows, first: int, vocab_size: int) -> IntArray:
    """Make one token for each sample, from `first` on, of its context and its index among the samples of a request."""
    indices: Any = [seats.sampling[seat].sample_index for seat in rows.sample_seats]
    mixed = (last[rows.sample_rows] + np.array(indices, dtype=np.uint64)) * _MIX
    return np.asarray(first + (mixed >> np.uint64(33)).astype(np.int64) % (vocab_size - first))


def _copy(pairs: BlockPairs, source: Checksums, destination: Checksums) -> None:
    if pairs:
        sources, destinations = zip(*pairs, strict=True)
        destination[list(destinations)] = source[list(sources)]
