"""Blocks out of a pool and into it: read beside the steps, placed by them, and named by their form."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch

from common.bounds import MOST_READ_BLOCKS
from common.step import Step
from tests.worker.device.simulated_streams import SimulatedStreams
from tests.worker.runners import MAKE_RUNNERS, NUM_FETCHED_BLOCKS, SteppedRunner
from tests.worker.steps import seat_state
from worker_svc.memory.kv_pool import BlockShape, KVPool, as_bytes
from worker_svc.model.decoder import Decoder
from worker_svc.start.block_travel import block_format, num_fetched_blocks
from worker_svc.steps.pool_reader import PoolReader
from worker_svc.steps.step_limits import InvalidStepError, MissingBlocksError
from worker_svc.steps.streams import DeviceStreams

CPU = torch.device("cpu")
MIB = 1 << 20
PROMPT = [5, 9, 2, 7, 7, 3, 8, 1, 6]  # two blocks of 4 are full
SHAPE = BlockShape(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.bfloat16)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8)


def random_pool(dtype: torch.dtype) -> KVPool:
    pool = KVPool(replace(SHAPE, dtype=dtype), 9, CPU)
    as_bytes(pool.blocks)[:] = torch.randint(0, 256, as_bytes(pool.blocks).shape, dtype=torch.uint8).numpy()
    return pool


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("streams", [None, DeviceStreams(CPU)], ids=["in main memory", "as from a device"])
def test_a_reader_returns_the_bytes_of_blocks_in_the_order_asked_for(
    dtype: torch.dtype, streams: DeviceStreams | None
) -> None:
    pool = random_pool(dtype)
    reader = PoolReader(pool, 4, streams)
    assert (reader.most_blocks, reader.num_blocks) == (4, 9)
    for block_ids in ([3], [8, 0, 8, 2], [1, 2]):
        expected = b"".join(as_bytes(pool.blocks)[block].tobytes() for block in block_ids)
        assert bytes(reader.read(block_ids)) == expected
        assert len(expected) == len(block_ids) * pool.shape.bytes_per_block


def test_a_reader_returns_when_the_device_has_done_what_was_queued_on_its_stream() -> None:
    streams, done = SimulatedStreams(Random(1)), list[int]()
    reader = PoolReader(random_pool(torch.float32), 4, streams)
    for number in range(3):
        streams.both.do("side", partial(done.append, number))
        reader.read([3, 8])
        assert done == [*range(number + 1)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fetched_blocks_go_into_the_pool(dtype: torch.dtype) -> None:
    pool = KVPool(replace(SHAPE, dtype=dtype), 9, CPU, num_fetched_blocks=3)
    as_bytes(pool.fetched_blocks)[:] = torch.arange(3, dtype=torch.uint8)[:, None].numpy() + 1
    pool.place([(2, 8), (0, 4)])
    found = [set(row.tolist()) for row in as_bytes(pool.blocks)]
    assert found == [{0}] * 4 + [{1}] + [{0}] * 3 + [{3}]


@pytest.mark.parametrize(
    ("memory_bytes", "num_blocks", "block_bytes", "num_fetched"),
    [
        (None, 1_000, MIB, 62),  # a sixteenth
        (None, 100, MIB, 16),  # at least 16 MiB
        (None, 10, MIB, 10),  # no more than the pool
        (None, 100_000, MIB, 256),
        (None, 100, 64 * MIB, 4),
        (0, 1_000, MIB, 0),
        (MIB - 1, 1_000, MIB, 0),
        (5 * MIB, 1_000, MIB, 5),
        (1 << 40, 1 << 22, 1024, MOST_READ_BLOCKS),
    ],
)
def test_memory_for_fetched_blocks_is_a_part_of_the_pool_or_what_was_asked_for(
    memory_bytes: int | None, num_blocks: int, block_bytes: int, num_fetched: int
) -> None:
    assert num_fetched_blocks(memory_bytes, num_blocks, block_bytes) == num_fetched


def test_formats_are_equal_only_where_model_weights_dtype_sizes_and_layout_are() -> None:
    formats = [
        block_format("a" * 64, "bfloat16", SHAPE, "plain"),
        block_format("b" * 64, "bfloat16", SHAPE, "plain"),
        block_format("a" * 64, "bfloat16 int8", SHAPE, "plain"),
        block_format("a" * 64, "float32", SHAPE, "plain"),
        block_format("a" * 64, "bfloat16", SHAPE, "native-1"),
        block_format("a" * 64, "bfloat16", replace(SHAPE, dtype=torch.int8), "plain"),
        block_format("a" * 64, "bfloat16", replace(SHAPE, block_size=8), "plain"),
        block_format("a" * 64, "bfloat16", replace(SHAPE, block_size=8, num_layers=1), "plain"),
    ]
    assert len(set(formats)) == len(formats)
    assert formats[0] == block_format("a" * 64, "bfloat16", replace(SHAPE), "plain")
    assert max(map(len, formats)) < 256


def greedy(runner: SteppedRunner, step: Step, num_tokens: int) -> list[int]:
    """Tokens of the step's only row, and of decode steps after it."""
    results = [runner.run(step)]
    results += [runner.run(Step(epoch=1, step_id=step.step_id + i, rows=[0])) for i in range(1, num_tokens)]
    return [int(result.token_ids[0]) for result in results]


@pytest.mark.parametrize("kind", MAKE_RUNNERS)
def test_a_runner_goes_on_from_blocks_of_another_beside_swaps_and_copies(decoder: Decoder, kind: str) -> None:
    """Blocks 20 and 21 of the destination are saved before others are placed there, and one comes back elsewhere."""
    (source, pool), (destination, own_pool) = MAKE_RUNNERS[kind](decoder), MAKE_RUNNERS[kind](decoder)
    whole = seat_state(0, PROMPT, [7, 3, 9, 11])
    start = Step(epoch=1, step_id=1, snapshot=True, whole=[whole], rows=[0], num_tokens=[len(PROMPT)])
    tokens = greedy(source, start, 5)
    other = seat_state(1, PROMPT[::-1], [20, 21, 22])
    destination.run(Step(epoch=1, step_id=1, snapshot=True, whole=[other], rows=[1], num_tokens=[len(PROMPT)]))
    saved = own_pool.blocks[20].clone()
    fetch = destination.fetched.open(1, 7, 2, lambda end: None)
    destination.fetched.write(fetch, 0, PoolReader(pool, 3).read([7, 3]))
    known = [*PROMPT[8:], tokens[0]]
    seat = seat_state(0, known, [20, 30, 31, 32], position=8, num_prompt_tokens=len(PROMPT))
    step = Step(epoch=1, step_id=2, whole=[seat], rows=[0], num_tokens=[len(known)], freed_seats=[1])
    moves = replace(step, swap_out=[20, 5], placed=[7, 0, 20, 7, 1, 29], swap_in=[5, 40], copies=[29, 30])
    assert greedy(destination, moves, 4) == tokens[1:]
    assert torch.equal(own_pool.blocks[40], saved)
    assert destination.fetched.num_free == NUM_FETCHED_BLOCKS, "it is freed once it is placed"


@pytest.mark.parametrize("kind", MAKE_RUNNERS)
def test_a_step_that_is_refused_or_breaks_off_keeps_no_place(decoder: Decoder, kind: str) -> None:
    runner, pool = MAKE_RUNNERS[kind](decoder)
    content = memoryview(bytes(pool.shape.bytes_per_block))
    fetch = runner.fetched.open(1, 1, 1, lambda end: None)
    runner.fetched.write(fetch, 0, content)
    start = Step(epoch=1, step_id=1, snapshot=True, whole=[seat_state(0, PROMPT, [0, 1, 2])])
    with pytest.raises(MissingBlocksError):
        runner.run(replace(start, placed=[1, 1, 5]))
    with pytest.raises(InvalidStepError):
        runner.run(replace(start, placed=[1, 0, 5], rows=[1]))
    assert torch.isnan(pool.blocks[5]).all()
    assert runner.fetched.num_free == NUM_FETCHED_BLOCKS - 1
    assert runner.run(replace(start, placed=[1, 0, 5])).swap_ns > 0
    assert not pool.blocks[5].any()
    assert runner.fetched.num_free == NUM_FETCHED_BLOCKS
