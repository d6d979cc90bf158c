"""Random steps of block moves through a `BlockMover`, beside a plain reading of what they say."""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

import torch

from common.sampling_params import SequenceSampling
from common.step import SequenceState, Step
from tests.worker.device.simulated_streams import SimulatedStreams
from tests.worker.device.two_streams import Operation
from worker_svc.gpu.block_moves import BlockMover, PendingSwaps
from worker_svc.memory.kv_pool import BlockShape, KVPool
from worker_svc.operations import CopyByTable, SwapBlocks
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.step_upload import StepUpload

NUM_BLOCKS, NUM_HOST_BLOCKS, NUM_FETCHED_BLOCKS, BLOCK_SIZE, NUM_SEATS, MAX_BLOCKS = 12, 8, 6, 2, 2, 3
FETCH = 1  # its blocks lie in their order in the memory for them


class MovedPools:
    """Pools of random bytes; each step also has rows, which add 1 to every byte of the blocks that they write."""

    def __init__(
        self,
        device: torch.device,
        copy_by_table: CopyByTable,
        swap_blocks: SwapBlocks,
        words: int,
        simulated: SimulatedStreams | None = None,
    ) -> None:
        """Blocks of 32 times `words` bytes; on a CPU everything is done at once, unless streams are simulated."""
        shape = BlockShape(num_layers=2, num_kv_heads=words, head_dim=4, block_size=BLOCK_SIZE, dtype=torch.int8)
        self.pool = KVPool(shape, NUM_BLOCKS, device, NUM_HOST_BLOCKS, NUM_FETCHED_BLOCKS)
        for blocks in (self.pool.blocks, self.pool.host_blocks, self.pool.fetched_blocks):
            blocks.copy_(torch.randint(-128, 128, blocks.shape, dtype=torch.int8))
        self.expected = self.pool.blocks.cpu().clone()  # on a CPU it is the pool itself
        self.expected_host = self.pool.host_blocks.clone()
        limits = StepLimits(
            num_seats=NUM_SEATS,
            num_blocks=NUM_BLOCKS,
            num_host_blocks=NUM_HOST_BLOCKS,
            block_size=BLOCK_SIZE,
            vocab_size=10,
            max_model_len=MAX_BLOCKS * BLOCK_SIZE,
            max_batched_tokens=64,
        )
        self._table = SeatTable(limits)
        self._upload = StepUpload(device, {}, capacity_bytes=64)  # so small that some tables go apart
        self._mover = BlockMover(self.pool, copy_by_table, swap_blocks, simulated)
        self._simulated = simulated
        self._queue: Callable[[Operation], None] = _at_once if simulated is None else simulated.queue

    def execute(self, step: Step, *, delay_cycles: int = 0) -> PendingSwaps:
        """Queue a step, with the main stream held up for this many GPU cycles before its rows are computed."""
        checked = self._table.apply(step)
        self._upload.begin()
        packed = self._mover.pack(self._upload, checked, [(index, block) for _, index, block in checked.placed])
        self._upload.send()
        swaps = self._mover.launch(packed, self._table, checked.rows)
        if delay_cycles:
            torch.cuda._sleep(delay_cycles)
        rows = checked.rows
        for seat, start, end in zip(rows.seats.tolist(), rows.starts.tolist(), rows.ends.tolist(), strict=True):
            for block in self._table.block_tables[seat, start // BLOCK_SIZE : -(-end // BLOCK_SIZE)].tolist():
                self._queue(partial(self.pool.blocks[block].add_, 1))
                self.expected[block] += 1
        return swaps

    def read_plainly(self, step: Step) -> None:
        """Moves as the step says: of each kind, all sources are read before any destination is written."""
        for flat, source, destination in (
            (step.swap_out, self.expected, self.expected_host),
            (_pairs_of(step.placed), self.pool.fetched_blocks, self.expected),
            (step.swap_in, self.expected_host, self.expected),
            (step.copies, self.expected, self.expected),
        ):
            destination[list(flat[1::2])] = source[list(flat[::2])]

    def finish(self) -> None:
        if self._simulated is not None:
            self._simulated.both.run()

    def assert_equal(self) -> None:
        assert torch.equal(self.pool.blocks.cpu(), self.expected)
        assert torch.equal(self.pool.host_blocks, self.expected_host)


def _pairs_of(placed: Sequence[int]) -> list[int]:
    return [number for i in range(0, len(placed), 3) for number in placed[i + 1 : i + 3]]


def _at_once(operation: Operation) -> None:
    operation()


def random_step(random: Random, step_id: int) -> Step:
    """Moves between any blocks, and rows of seats placed anew on any blocks."""
    whole = []
    for seat in range(NUM_SEATS):
        position = random.randrange(MAX_BLOCKS * BLOCK_SIZE)
        num_tokens = random.randint(1, MAX_BLOCKS * BLOCK_SIZE - position)
        blocks = random.sample(range(NUM_BLOCKS), MAX_BLOCKS)
        state = SequenceState(
            seat=seat,
            position=position,
            block_table=blocks,
            token_ids=[0] * num_tokens,
            num_prompt_tokens=0,
            sampling=SequenceSampling(seed=0),
        )
        whole.append(state)
    return Step(
        epoch=1,
        step_id=step_id,
        snapshot=True,
        whole=whole,
        swap_out=_pairs(random, NUM_BLOCKS, NUM_HOST_BLOCKS),
        placed=_placed(random),
        swap_in=_pairs(random, NUM_HOST_BLOCKS, NUM_BLOCKS),
        copies=_pairs(random, NUM_BLOCKS, NUM_BLOCKS),
        rows=[state.seat for state in whole],
        num_tokens=[len(state.token_ids) for state in whole],
    )


def _pairs(random: Random, num_sources: int, num_destinations: int) -> list[int]:
    count = random.choice([0, 0, 1, 3, min(num_sources, num_destinations)])
    sources, destinations = random.choices(range(num_sources), k=count), random.sample(range(num_destinations), count)
    return [block for pair in zip(sources, destinations, strict=True) for block in pair]


def _placed(random: Random) -> list[int]:
    pairs = _pairs(random, NUM_FETCHED_BLOCKS, NUM_BLOCKS)
    return [number for i in range(0, len(pairs), 2) for number in (FETCH, *pairs[i : i + 2])]


def move_at_random(pools: MovedPools, num_steps: int, *, max_delay_cycles: int = 0, seed: int = 1) -> None:
    """Run many steps at once; assert their effects, and that only swaps took time."""
    random = Random(seed)
    pending = []
    for step_id in range(1, num_steps + 1):
        step = random_step(random, step_id)
        pools.read_plainly(step)
        swaps = pools.execute(step, delay_cycles=random.choice([0, max_delay_cycles]))
        pending.append((swaps, bool(step.swap_out or step.placed or step.swap_in)))
    for swaps, has_swaps in pending:
        assert (swaps.wait() > 0) == has_swaps
    pools.finish()
    pools.assert_equal()
