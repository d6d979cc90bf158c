"""Blocks between two worker services over a real connection: who may read and fetch, when, and for how long."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import grpc
import numpy as np
import pytest

from common.arrays import pack_int32
from common.block_reads import read_key
from common.rpc import CLUSTER_MESSAGE_BYTES
from common.serving import GrpcServer
from common.step import Step, StepResult, StepStatus
from common.step_wire import STEP_KEY
from quire.rpc import channel_options
from quire.v1 import worker_pb2 as pb
from quire.v1 import worker_pb2_grpc
from tests.patience import patient
from tests.worker.test_servicer import DESCRIPTION
from tests.worker.travelling import code_of, until_come
from worker_svc.loaded_model import TravellingBlocks
from worker_svc.service.block_reads import BlockReads
from worker_svc.service.block_source import GrpcBlockSource
from worker_svc.service.fetch_calls import FetchCalls
from worker_svc.service.servicer import SERVICE_NAME, LoadedWorker, ServedBlocks, WorkerServicer, add_to_server
from worker_svc.steps.executor import StepExecutor
from worker_svc.steps.fetched_blocks import FetchedBlocks
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.task_thread import TaskThread

NUM_BLOCKS, BLOCK_BYTES, NUM_FETCHED, FRAME_BLOCKS, EPOCH = 32, 24, 6, 2, 5
OK, NEED_SNAPSHOT = StepStatus.OK, StepStatus.NEED_SNAPSHOT
Code = grpc.StatusCode


class BytesPool:
    """Pool of bytes: a runner whose steps only place blocks, and a reader; a test can hold up both."""

    def __init__(self, seed: int) -> None:
        self.most_blocks = FRAME_BLOCKS
        self.num_blocks = NUM_BLOCKS
        self.blocks = np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.memory = np.zeros((NUM_FETCHED, BLOCK_BYTES), dtype=np.uint8)
        self.fetched = FetchedBlocks(self.memory)
        self.before_launch: Callable[[], None] = lambda: None
        self.before_read: Callable[[], None] = lambda: None
        self._seats = SeatTable(DESCRIPTION.limits)

    def read(self, block_ids: Sequence[int]) -> memoryview:
        self.before_read()
        return self.blocks[list(block_ids)].reshape(-1).data

    def launch(self, step: Step) -> StepResult:
        self.before_launch()
        checked = self._seats.check(step)
        placed = self.fetched.take(step.epoch, checked.placed)
        self._seats.take_over(step, checked)
        for place, block in placed:
            self.blocks[block] = self.memory[place]
        self.fetched.release(placed)
        return StepResult(epoch=step.epoch, step_id=step.step_id)


class HeldReads:
    """Holds up the reads of a pool behind the first ones."""

    def __init__(self, pool: BytesPool, num_first: int = 1) -> None:
        self.go_on = threading.Event()
        self._num_left = num_first
        pool.before_read = self.hold

    def hold(self) -> None:
        assert self._num_left > 0 or self.go_on.wait(patient(60))  # longer than anything here waits for
        self._num_left -= 1


class CountedReads(BlockReads):
    """Reads of which those that go on are counted."""

    num_open = 0

    async def frames(self, request: pb.ReadBlocksRequest) -> AsyncGenerator[bytes]:
        self.num_open += 1
        try:
            async with aclosing(super().frames(request)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            self.num_open -= 1


class Site:
    """A served worker with its step key, and a client of it."""

    def __init__(self, name: str, seed: int, block_format: str = "bytes") -> None:
        self.name, self.key = name, f"key of {name}"
        self.pool = BytesPool(seed)
        self.thread, self.copies = TaskThread("execution"), TaskThread("block copies")
        self.executor = StepExecutor(self.pool, self.thread, on_device_lost=pytest.fail)
        self.servicer = WorkerServicer(name, f"life of {name}", self.key)
        travel = TravellingBlocks(block_format, self.pool, self.pool.fetched)
        progress = self.executor.progress
        progress.on_epoch = self.pool.fetched.follow_epoch
        self.reads = CountedReads(travel, progress, self.copies)
        served = ServedBlocks(
            reads=self.reads,
            fetches=FetchCalls(travel, progress, self.copies, GrpcBlockSource()),
            format=block_format,
            fetched=self.pool.fetched,
        )
        self.servicer.serve(LoadedWorker(DESCRIPTION, self.executor, served))
        self.server = GrpcServer([SERVICE_NAME], CLUSTER_MESSAGE_BYTES)
        add_to_server(self.servicer, self.server.grpc)
        self.address = self.server.bind("127.0.0.1:0")
        self.channel = grpc.aio.insecure_channel(self.address, options=channel_options(CLUSTER_MESSAGE_BYTES))
        self.stub: Any = worker_pb2_grpc.WorkerStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()
        await self.server.stop(0)
        await self.executor.close()
        await self.copies.close()
        await self.thread.close()

    async def step(self, step_id: int, *, epoch: int = EPOCH, snapshot: bool = False, **fields: Any) -> StepResult:
        step = Step(epoch=epoch, step_id=step_id, snapshot=snapshot, **fields)
        return await self.executor.answer(step)

    async def follow_epoch(self, epoch: int) -> None:
        self.executor.follow_epoch(epoch)
        await self.thread.call(lambda: None)

    def read_request(self, block_ids: Sequence[int], **fields: Any) -> pb.ReadBlocksRequest:
        """A request with the right key, unless `fields` say otherwise."""
        incarnation, packed = self.servicer.incarnation, pack_int32(block_ids)
        request = pb.ReadBlocksRequest(
            epoch=EPOCH,
            incarnation=incarnation,
            block_ids=packed,
            read_key=read_key(self.key, EPOCH, incarnation, packed),
        )
        for name, value in fields.items():
            setattr(request, name, value)
        return request

    def fetch(self, source: "Site", block_ids: Sequence[int], fetch_id: int = 1, **fields: Any) -> Any:
        key = fields.pop("step_key", self.key)
        epoch, address = fields.pop("own_epoch", EPOCH), fields.pop("source_address", source.address)
        request = pb.FetchBlocksRequest(
            fetch_id=fetch_id, source_address=address, source=source.read_request(block_ids, **fields), epoch=epoch
        )
        return self.stub.FetchBlocks(request, metadata=((STEP_KEY, key),))

    async def until_free(self, num_blocks: int) -> None:
        await until(lambda: self.pool.fetched.num_free == num_blocks)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until this holds."""
    async with asyncio.timeout(patient(30)):
        while not holds():  # noqa: ASYNC110 - it changes on any thread
            await asyncio.sleep(0.002)


@pytest.fixture
async def sites() -> AsyncIterator[tuple[Site, Site]]:
    """Source and destination; both have executed step 1."""
    made = Site("a", seed=1), Site("b", seed=2)
    async with AsyncExitStack() as stack:
        for site in made:
            await site.server.start()
            stack.push_async_callback(site.close)
            assert (await site.step(1, snapshot=True)).status is OK
        yield made


async def test_what_was_fetched_is_where_the_step_places_it(sites: tuple[Site, Site]) -> None:
    source, destination = sites
    call = destination.fetch(source, [4, 9, 4, 31, 0])
    come = [(await call.read()).num_blocks for _ in range(3)]
    assert come == [2, 4, 5], "frames have two blocks"
    before = destination.pool.blocks.copy()
    assert (await destination.step(2, placed=[1, 4, 7, 1, 1, 8])).status is OK
    before[7], before[8] = source.pool.blocks[0], source.pool.blocks[9]
    assert np.array_equal(destination.pool.blocks, before)
    assert await code_of(call) is Code.OK
    assert destination.pool.fetched.num_free == NUM_FETCHED
    assert (await destination.step(3, placed=[1, 2, 7])).status is NEED_SNAPSHOT, "a fetch is placed once"


async def test_blocks_are_read_while_a_step_is_executed(sites: tuple[Site, Site]) -> None:
    source, destination = sites
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(30)

    source.pool.before_launch = hold
    step = asyncio.create_task(source.step(2))
    assert await asyncio.to_thread(begun.wait, 30)
    await until_come(destination.fetch(source, [3]), 1)
    assert not step.done()
    go_on.set()
    assert (await step).status is OK


async def test_a_step_that_places_what_has_not_come_changes_nothing_and_needs_a_snapshot(
    sites: tuple[Site, Site],
) -> None:
    source, destination = sites
    held = HeldReads(source.pool, num_first=0)
    call = destination.fetch(source, [3, 4])
    before = destination.pool.blocks.copy()
    answer = await destination.step(2, placed=[1, 0, 5])
    assert (answer.status, answer.error) == (NEED_SNAPSHOT, "block 0 of fetch 1 has not come, or is kept no longer")
    assert (await destination.step(3)).status is NEED_SNAPSHOT
    assert (await destination.step(3, snapshot=True, placed=[2, 0, 5])).status is NEED_SNAPSHOT
    assert np.array_equal(destination.pool.blocks, before)
    held.go_on.set()
    await until_come(call, 2)
    assert (await destination.step(4, snapshot=True, placed=[1, 0, 5])).status is OK


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"read_key": "0" * 64}, Code.PERMISSION_DENIED),
        ({"read_key": ""}, Code.PERMISSION_DENIED),
        ({}, Code.OK),
        ({"step_key": "of nobody"}, Code.PERMISSION_DENIED),
        ({"own_epoch": EPOCH - 1}, Code.FAILED_PRECONDITION),
        ({"source_address": "127.0.0.1:1"}, Code.UNAVAILABLE),
        ({"source_address": "127.0.0.1:1,127.0.0.1:2"}, Code.INVALID_ARGUMENT),
        ({"source_address": "unix:/tmp/x"}, Code.INVALID_ARGUMENT),
        ({"source_address": ""}, Code.INVALID_ARGUMENT),
        ({"fetch_id": 0}, Code.INVALID_ARGUMENT),
    ],
)
async def test_a_fetch_that_may_not_be_ends_with_its_reason(
    sites: tuple[Site, Site], fields: dict[str, Any], code: grpc.StatusCode
) -> None:
    source, destination = sites
    call = destination.fetch(source, [3], **fields)
    if code is Code.OK:
        await until_come(call, 1)
        call.cancel()
    else:
        assert await code_of(call) is code
    await destination.until_free(NUM_FETCHED)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda request: setattr(request, "epoch", EPOCH + 1), Code.FAILED_PRECONDITION),
        (lambda request: setattr(request, "epoch", EPOCH - 1), Code.FAILED_PRECONDITION),
        (lambda request: setattr(request, "incarnation", "a former life"), Code.FAILED_PRECONDITION),
        (lambda request: setattr(request, "block_format", "other bytes"), Code.FAILED_PRECONDITION),
        (lambda request: setattr(request, "block_ids", b""), Code.INVALID_ARGUMENT),
        (lambda request: setattr(request, "block_ids", b"\0\0\0\0\0"), Code.INVALID_ARGUMENT),
        (lambda request: setattr(request, "block_ids", pack_int32([0, NUM_BLOCKS])), Code.INVALID_ARGUMENT),
        (lambda request: setattr(request, "block_ids", pack_int32([-1])), Code.INVALID_ARGUMENT),
        (lambda request: None, Code.OK),
    ],
)
async def test_a_read_that_may_not_be_ends_with_its_reason(
    sites: tuple[Site, Site], change: Any, code: grpc.StatusCode
) -> None:
    source, _ = sites
    request = source.read_request([3, 4], block_format="bytes")
    change(request)
    request.read_key = read_key(source.key, request.epoch, request.incarnation, request.block_ids)
    assert await code_of(source.stub.ReadBlocks(request)) is code


async def test_more_than_the_memory_holds_is_refused_until_something_is_placed(sites: tuple[Site, Site]) -> None:
    source, destination = sites
    first = destination.fetch(source, [1, 2, 3, 4])
    await until_come(first, 4)
    assert await code_of(destination.fetch(source, [5, 6, 7], fetch_id=2)) is Code.RESOURCE_EXHAUSTED
    assert await code_of(destination.fetch(source, [5], fetch_id=1)) is Code.ALREADY_EXISTS
    await destination.step(2, placed=[1, 3, 0])
    second = destination.fetch(source, [5, 6, 7], fetch_id=2)
    await until_come(second, 3)
    assert destination.pool.fetched.num_free == NUM_FETCHED - 3


async def test_a_call_that_its_caller_drops_leaves_nothing_behind(sites: tuple[Site, Site]) -> None:
    source, destination = sites
    held = HeldReads(source.pool)
    whole = destination.fetch(source, [1, 2])
    await until_come(whole, 2)
    await until(lambda: source.reads.num_open == 0)
    coming = destination.fetch(source, [3, 4], fetch_id=2)
    await until(lambda: source.reads.num_open == 1)
    whole.cancel()
    coming.cancel()
    await destination.until_free(NUM_FETCHED)
    assert (await destination.step(2, placed=[1, 0, 0])).status is NEED_SNAPSHOT
    await until(lambda: source.reads.num_open == 0)
    held.go_on.set()


async def test_a_source_that_ends_midway_is_unavailable_and_what_came_is_dropped(sites: tuple[Site, Site]) -> None:
    source, destination = sites
    held = HeldReads(source.pool)
    call = destination.fetch(source, [1, 2, 3, 4])
    await until_come(call, 2)
    await source.server.stop(0)
    held.go_on.set()
    assert await code_of(call) is Code.UNAVAILABLE
    assert (await destination.step(2, placed=[1, 0, 0])).status is NEED_SNAPSHOT
    assert destination.pool.fetched.num_free == NUM_FETCHED


async def test_a_source_that_fails_midway_is_unavailable(sites: tuple[Site, Site]) -> None:
    source, destination = sites

    def fail() -> None:
        raise RuntimeError("the device is lost")

    source.pool.before_read = fail
    assert await code_of(destination.fetch(source, [1, 2])) is Code.UNAVAILABLE


async def test_what_has_come_can_be_placed_while_the_rest_is_on_its_way(sites: tuple[Site, Site]) -> None:
    source, destination = sites
    held = HeldReads(source.pool)
    call = destination.fetch(source, [1, 2, 3, 4])
    await until_come(call, 2)
    assert (await destination.step(2, placed=[1, 1, 9])).status is OK
    assert np.array_equal(destination.pool.blocks[9], source.pool.blocks[2])
    assert (await destination.step(3, placed=[1, 1, 8])).status is NEED_SNAPSHOT, "a block is placed once"
    held.go_on.set()
    await until_come(call, 4)
    assert (await destination.step(4, snapshot=True, placed=[1, 0, 7, 1, 3, 8])).status is OK
    assert np.array_equal(destination.pool.blocks[7:9], source.pool.blocks[[1, 4]])
    assert await code_of(call) is Code.OK
    await destination.until_free(NUM_FETCHED)


async def test_steps_of_another_epoch_end_fetches(sites: tuple[Site, Site]) -> None:
    source, destination = sites
    held = HeldReads(source.pool)
    kept = destination.fetch(source, [1, 2])
    await until_come(kept, 2)
    coming = destination.fetch(source, [3], fetch_id=2)
    await destination.until_free(NUM_FETCHED - 3)
    await destination.step(1, epoch=EPOCH + 1, snapshot=True)
    assert await code_of(kept) is Code.FAILED_PRECONDITION
    assert await code_of(coming) is Code.FAILED_PRECONDITION
    held.go_on.set()


async def test_a_fetch_of_the_next_epoch_waits_for_its_first_step(sites: tuple[Site, Site]) -> None:
    source, destination = sites
    call = destination.fetch(source, [1], own_epoch=EPOCH + 1)
    await until_come(call, 1)
    assert (await destination.step(2, placed=[1, 0, 0])).status is NEED_SNAPSHOT, "it is not of this epoch"
    assert (await destination.step(1, epoch=EPOCH + 1, snapshot=True, placed=[1, 0, 0])).status is OK
    assert np.array_equal(destination.pool.blocks[0], source.pool.blocks[1])


@pytest.mark.parametrize(
    ("begin", "code"),
    [
        (lambda source: source.step(1, snapshot=True), Code.FAILED_PRECONDITION),
        (lambda source: source.step(2, snapshot=True), Code.FAILED_PRECONDITION),
        (lambda source: source.step(1, epoch=EPOCH + 1, snapshot=True), Code.FAILED_PRECONDITION),
        (lambda source: source.follow_epoch(EPOCH + 1), Code.FAILED_PRECONDITION),
        (lambda source: source.step(3), Code.OK),
        (lambda source: source.step(3, snapshot=True), Code.OK),
    ],
)
async def test_what_is_copied_while_steps_of_another_count_begin_is_not_sent(
    sites: tuple[Site, Site], begin: Callable[[Site], Awaitable[StepResult | None]], code: grpc.StatusCode
) -> None:
    """Steps of another epoch, or counted anew within it, may write the blocks that are read; others may not."""
    source, _ = sites
    loop = asyncio.get_running_loop()
    await source.step(2)

    async def begun() -> StepResult | None:
        return await begin(source)

    def begin_steps() -> None:
        source.pool.before_read = lambda: None
        answer = asyncio.run_coroutine_threadsafe(begun(), loop).result(30)
        assert answer is None or answer.status is OK

    source.pool.before_read = begin_steps
    call = source.stub.ReadBlocks(source.read_request([3], block_format="bytes"))
    assert await code_of(call) is code


async def test_another_life_of_a_worker_forgets_fetches_and_is_not_read(sites: tuple[Site, Site]) -> None:
    source, destination = sites
    kept = destination.fetch(source, [1, 2])
    await until_come(kept, 2)
    request = source.read_request([1])
    for site in sites:
        site.servicer.begin_life(f"second life of {site.name}", "another key")
    assert await code_of(kept) is Code.FAILED_PRECONDITION
    assert await code_of(destination.fetch(source, [1])) is Code.PERMISSION_DENIED
    request.block_format, request.read_key = (
        "bytes",
        read_key("another key", EPOCH, request.incarnation, request.block_ids),
    )
    assert await code_of(source.stub.ReadBlocks(request)) is Code.FAILED_PRECONDITION


async def test_a_worker_that_ends_forgets_fetches(sites: tuple[Site, Site]) -> None:
    source, destination = sites
    kept = destination.fetch(source, [1, 2])
    await until_come(kept, 2)
    await destination.servicer.drain()
    assert await code_of(kept) is Code.FAILED_PRECONDITION
    assert await code_of(destination.fetch(source, [1], fetch_id=2)) is Code.UNAVAILABLE


async def test_a_description_says_in_which_form_blocks_are_and_how_many_are_kept(sites: tuple[Site, Site]) -> None:
    pool = (await sites[0].stub.Describe(pb.DescribeRequest())).pool
    assert (pool.block_format, pool.max_fetched_blocks) == ("bytes", NUM_FETCHED)
