"""Swaps beside computation: any order that the events allow leaves the same memory, and few waits are asked for."""

from dataclasses import dataclass, field
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.device.two_streams import TwoStreams
from worker_svc.gpu.move_hazards import NUM_REMEMBERED, MovePlan, OutstandingMoves, StepBlocks, blocks_of
from worker_svc.steps.step_check import BlockPairs, StepRows

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE, NUM_SEATS, MAX_BLOCKS = 10, 6, 2, 3, 4
NONE = np.zeros(0, dtype=np.int64)


def rows_of(seats: list[int], starts: list[int], ends: list[int]) -> StepRows:
    seat_array, start_array, end_array = (np.array(column, dtype=np.int64) for column in (seats, starts, ends))
    return StepRows(seat_array, start_array, end_array, NONE, NONE, NONE, NONE)


@dataclass(frozen=True)
class RandomStep:
    """Moves of a step, and for each row the blocks that it reads and the number of last ones that it writes."""

    swap_out: BlockPairs
    swap_in: BlockPairs
    copies: BlockPairs
    rows: list[tuple[list[int], int]]

    @classmethod
    def draw(cls, random: Random) -> "RandomStep":
        rows = []
        for _ in range(random.randint(0, NUM_SEATS)):
            read = random.sample(range(NUM_BLOCKS), random.randint(1, MAX_BLOCKS))
            rows.append((read, random.randint(1, len(read))))
        return cls(
            _pairs(random, NUM_BLOCKS, NUM_HOST_BLOCKS),
            _pairs(random, NUM_HOST_BLOCKS, NUM_BLOCKS),
            _pairs(random, NUM_BLOCKS, NUM_BLOCKS),
            rows,
        )

    def blocks(self, random: Random) -> StepBlocks:
        """Blocks by way of block tables, whose unused columns hold anything."""
        tables = np.array([random.choices(range(NUM_BLOCKS), k=MAX_BLOCKS) for _ in range(NUM_SEATS)], dtype=np.int32)
        seats = random.sample(range(NUM_SEATS), len(self.rows))
        starts, ends = [], []
        for seat, (read, num_written) in zip(seats, self.rows, strict=True):
            tables[seat, : len(read)] = read
            starts.append((len(read) - num_written) * BLOCK_SIZE + random.randrange(BLOCK_SIZE))
            last = max(starts[-1], (len(read) - 1) * BLOCK_SIZE)
            ends.append(random.randint(last + 1, len(read) * BLOCK_SIZE))
        return blocks_of(tables, BLOCK_SIZE, rows_of(seats, starts, ends), self.copies)


def _pairs(random: Random, num_sources: int, num_destinations: int) -> BlockPairs:
    count = random.choice([0, 0, 0, 1, 3])
    return list(
        zip(random.choices(range(num_sources), k=count), random.sample(range(num_destinations), count), strict=True)
    )


@dataclass
class Memory:
    """Memory of both pools, each block's content as a history, and each row's reads."""

    device: list[str] = field(default_factory=lambda: [f"d{block}" for block in range(NUM_BLOCKS)])
    host: list[str] = field(default_factory=lambda: [f"h{block}" for block in range(NUM_HOST_BLOCKS)])
    seen: list[str] = field(default_factory=list)

    def move_one(self, source: list[str], destination: list[str], pair: tuple[int, int]) -> None:
        destination[pair[1]] = source[pair[0]]

    def copy(self, pairs: BlockPairs) -> None:
        for (_, destination), content in zip(pairs, [self.device[source] for source, _ in pairs], strict=True):
            self.device[destination] = content

    def read(self, name: str, block: int) -> None:
        self.seen.append(f"{name} {block} {self.device[block]}")

    def write(self, name: str, block: int) -> None:
        self.device[block] = f"{name} {block}"


def queue_main(streams: TwoStreams, memory: Memory, number: int, step: RandomStep) -> None:
    if step.copies:
        streams.do("main", partial(memory.copy, step.copies))
    for row, (blocks, num_written) in enumerate(step.rows):
        name = f"step {number} row {row}"
        for block in blocks[-num_written:]:
            streams.do("main", partial(memory.write, name, block))
        for block in blocks:
            streams.do("main", partial(memory.read, name, block))


def queue_swaps(streams: TwoStreams, stream: str, memory: Memory, step: RandomStep, plan: MovePlan) -> None:
    for pairs, source, destination, swap in (
        (step.swap_out, memory.device, memory.host, plan.swap_out),
        (step.swap_in, memory.host, memory.device, plan.swap_in),
    ):
        for pair in pairs:
            streams.do(stream, partial(memory.move_one, source, destination, pair))
        assert (swap is not None) == bool(pairs)
        if swap is not None:
            streams.record(stream, ("swap", swap))


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_any_order_that_events_allow_leaves_what_one_stream_would(seed: int, watched_steps: int) -> None:
    random = Random(seed)
    memory, expected = Memory(), Memory()
    streams, one_stream = TwoStreams(random), TwoStreams(random)
    outstanding = OutstandingMoves(NUM_BLOCKS, watched_steps)
    swaps_seldom = random.random() < 0.5
    for number in range(1, 15):
        step = RandomStep.draw(random)
        if swaps_seldom and random.random() < 0.7:
            step = RandomStep([], [], step.copies, step.rows)
        newest = outstanding.newest_swap
        if newest is not None and streams.is_reached(("swap", newest)):
            outstanding.mark_done(newest)
        blocks = None
        if step.swap_out or step.swap_in or outstanding.is_watching:
            blocks = step.blocks(random)
            streams.record("main", ("main", number))
        plan = outstanding.plan(step.swap_out, step.swap_in, blocks)
        assert plan.step == number
        if plan.side_after is not None:
            assert number - NUM_REMEMBERED <= plan.side_after <= number
            streams.wait("side", ("main", plan.side_after))
        queue_swaps(streams, "side", memory, step, plan)
        if plan.main_after is not None:
            streams.wait("main", ("swap", plan.main_after))
        queue_main(streams, memory, number, step)
        queue_swaps(one_stream, "main", expected, step, plan)
        queue_main(one_stream, expected, number, step)
        streams.run(random.choice([0, 3, 30]))
    streams.run()
    one_stream.run()
    assert memory == expected


def touching(*, written: list[int] = [], read: list[int] = []) -> StepBlocks:  # noqa: B006  (never changed)
    tables = np.array([read], dtype=np.int32)
    return StepBlocks(np.array(written, dtype=np.int64), NONE, tables, np.array([len(read)]))


def test_a_step_waits_for_a_swap_out_only_where_it_writes_what_is_being_saved() -> None:
    outstanding = OutstandingMoves(NUM_BLOCKS)
    assert outstanding.plan([(5, 0)], [], touching(written=[1], read=[1, 5])).main_after is None
    assert outstanding.plan([], [], touching(written=[1], read=[1, 5])).main_after is None
    assert outstanding.plan([], [], touching(written=[5], read=[5])).main_after == 1
    assert outstanding.plan([], [], touching(written=[5], read=[5])).main_after is None, "once is enough"


def test_a_step_waits_for_a_swap_in_where_it_touches_what_is_restored() -> None:
    outstanding = OutstandingMoves(NUM_BLOCKS)
    plan = outstanding.plan([(4, 1)], [(0, 5)], touching(read=[4]))
    assert (plan.swap_out, plan.swap_in, plan.main_after) == (1, 2, None)
    assert outstanding.plan([], [], touching(read=[5])).main_after == 2
    assert outstanding.plan([], [], touching(written=[4])).main_after is None, "the swap-out came before"


def test_a_swap_waits_only_for_the_last_step_that_is_in_its_way() -> None:
    outstanding = OutstandingMoves(NUM_BLOCKS)
    outstanding.plan([(0, 0)], [], touching())  # from now on steps are remembered
    outstanding.plan([], [], touching(written=[1], read=[1, 2]))
    outstanding.plan([], [], touching(written=[3], read=[3]))
    assert outstanding.plan([(2, 1)], [], touching()).side_after == 2, "reading beside reading is no harm"
    outstanding.plan([], [], touching(written=[1], read=[1, 2]))
    outstanding.plan([], [], touching(written=[3], read=[3]))
    assert outstanding.plan([], [(0, 2)], touching()).side_after == 6
    outstanding.plan([], [], touching(written=[1], read=[1, 2]))
    assert outstanding.plan([(1, 2)], [], touching()).side_after == 9


def test_long_after_a_swap_steps_are_not_looked_at() -> None:
    outstanding = OutstandingMoves(NUM_BLOCKS, watched_steps=3)
    assert not outstanding.is_watching
    outstanding.plan([(0, 0)], [], touching())
    for _ in range(5):
        assert outstanding.is_watching
        outstanding.plan([], [], touching(read=[1]))
    outstanding.mark_done(1)
    assert not outstanding.is_watching
    outstanding.plan([], [], None)
    assert outstanding.plan([], [(0, 9)], touching()).side_after == 8, "it may have touched anything"


@pytest.mark.parametrize(
    ("start", "end", "written", "touched"),
    [(0, 1, [7], [7]), (3, 4, [8], [7, 8]), (4, 5, [9], [7, 8, 9]), (1, 5, [7, 8, 9], [7, 8, 9]), (2, 4, [8], [7, 8])],
)
def test_a_row_writes_the_blocks_of_its_tokens_and_reads_all_before(
    start: int, end: int, written: list[int], touched: list[int]
) -> None:
    tables = np.array([[0] * 4, [7, 8, 9, 3]], dtype=np.int32)
    blocks = blocks_of(tables, BLOCK_SIZE, rows_of([1], [start], [end]), [(5, 6)])
    assert blocks.written.tolist() == [*written, 6]
    assert sorted(set(blocks.touched().tolist())) == sorted({*touched, 5, 6})


def test_no_rows_touch_nothing() -> None:
    blocks = blocks_of(np.zeros((2, 3), dtype=np.int32), BLOCK_SIZE, rows_of([], [], []), [])
    assert len(blocks.touched()) == 0
