"""Blocks between two real worker processes: what is decoded from them is what the first worker alone decodes."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from common.step import StepStatus
from tests.chaos.proxy import Proxy
from tests.services import Service
from tests.worker.steps import seat_state
from tests.worker.tiny_models import random_prompts, write_tiny_model
from tests.worker.travelling import WorkerClient, code_of, until_come, worker_client, worker_process

NUM_PROMPT, NUM_TOKENS, BLOCK_SIZE = 33, 12, 4
SOURCE_BLOCKS = [7, 3, 19, 0, 11, 22, 5, 2, 30, 40, 41, 9]  # the first eight are full after the prompt
NUM_FULL = NUM_PROMPT // BLOCK_SIZE
PLACES = [50, 1, 2, 60, 9, 30, 31, 8, 4, 5, 6, 10]
SIZES = ("--num-blocks", "80", "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "4")
(PROMPT,) = random_prompts([NUM_PROMPT])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("qwen3", tmp_path_factory.mktemp("tiny-qwen3"))


@pytest.fixture(scope="module")
def services(folder: Path) -> Iterator[tuple[Service, Service]]:
    with worker_process(folder, *SIZES) as source, worker_process(folder, *SIZES) as destination:
        source.wait_for("ready")
        destination.wait_for("ready")
        yield source, destination


@pytest.fixture
async def workers(services: tuple[Service, Service]) -> AsyncIterator[tuple[WorkerClient, WorkerClient]]:
    """Source and destination, which begin a new count of steps."""
    source, destination = (service.wait_for("listening")["address"] for service in services)
    async with worker_client(source) as first, worker_client(destination) as second:
        yield first, second


async def prefill(worker: WorkerClient, blocks: list[int] = SOURCE_BLOCKS) -> int:
    """Compute the prompt from the beginning. Returns the token that follows it."""
    seat = seat_state(0, PROMPT, blocks)
    result = await worker.step(snapshot=True, whole=[seat], rows=[0], num_tokens=[NUM_PROMPT])
    assert result.status is StepStatus.OK, result.error
    (token_id,) = result.token_ids
    return token_id


async def decode(worker: WorkerClient, num_tokens: int) -> list[int]:
    """Decode seat 0 onwards."""
    return [(await worker.step(rows=[0])).token_ids[0] for _ in range(num_tokens)]


async def go_on(worker: WorkerClient, token_ids: list[int], placed: list[int]) -> list[int]:
    """Decode from blocks that were placed: all full ones of the prompt."""
    done = NUM_FULL * BLOCK_SIZE
    seat = seat_state(0, token_ids[done:], PLACES, position=done, num_prompt_tokens=NUM_PROMPT)
    num_left = len(token_ids) - done
    result = await worker.step(snapshot=True, placed=placed, whole=[seat], rows=[0], num_tokens=[num_left])
    assert result.status is StepStatus.OK, result.error
    assert result.swap_ns > 0
    return [result.token_ids[0], *await decode(worker, NUM_TOKENS - 1)]


def all_placed(fetch_id: int = 1) -> list[int]:
    return [number for index in range(NUM_FULL) for number in (fetch_id, index, PLACES[index])]


async def check_travel(source: WorkerClient, destination: WorkerClient) -> None:
    first = await prefill(source)
    call = destination.fetch(source, SOURCE_BLOCKS[:NUM_FULL])
    await until_come(call, NUM_FULL)
    outputs = await go_on(destination, [*PROMPT, first], all_placed())
    assert await code_of(call) is grpc.StatusCode.OK, "it ends when it is placed"
    assert outputs == await decode(source, NUM_TOKENS)


async def test_what_is_decoded_from_travelled_blocks_is_what_their_worker_decodes(
    workers: tuple[WorkerClient, WorkerClient],
) -> None:
    source, destination = workers
    assert (await source.describe()).pool.block_format == (await destination.describe()).pool.block_format != ""
    await check_travel(source, destination)


@pytest.mark.parametrize("options", [("--kv-dtype", "int8"), ("--runner", "device"), ("--kernels", "torch")])
async def test_so_with_each_kind_of_pool(folder: Path, options: tuple[str, str]) -> None:
    with worker_process(folder, *SIZES, *options) as one, worker_process(folder, *SIZES, *options) as other:
        one.wait_for("ready")
        other.wait_for("ready")
        addresses = [service.wait_for("listening")["address"] for service in (one, other)]
        async with worker_client(addresses[0]) as source, worker_client(addresses[1]) as destination:
            await check_travel(source, destination)


async def test_a_source_that_stores_blocks_otherwise_refuses(services: tuple[Service, Service], folder: Path) -> None:
    with worker_process(folder, *SIZES, "--kernels", "torch") as other:
        other.wait_for("ready")
        async with (
            worker_client(services[0].wait_for("listening")["address"]) as source,
            worker_client(other.wait_for("listening")["address"]) as destination,
        ):
            await prefill(source)
            call = destination.fetch(source, SOURCE_BLOCKS[:NUM_FULL])
            assert await code_of(call) is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_damaged_frame_is_data_loss_and_nothing_of_it_can_be_placed(
    workers: tuple[WorkerClient, WorkerClient],
) -> None:
    source, destination = workers
    await prefill(source)
    await destination.step(snapshot=True)
    block_format = (await source.describe()).pool.block_format
    frames = [frame async for frame in source.read(SOURCE_BLOCKS[:NUM_FULL], block_format)]
    content = b"".join(frame.blocks for frame in frames)[:64]

    def damage(data: bytes) -> bytes:
        return data.replace(content, bytes([content[0] ^ 4]) + content[1:])

    async with Proxy(source.address) as proxy:
        proxy.edit("down", damage)
        far = WorkerClient(grpc.aio.insecure_channel(proxy.address), proxy.address, source.incarnation)
        call = destination.fetch(far, SOURCE_BLOCKS[:NUM_FULL])
        assert await code_of(call) is grpc.StatusCode.DATA_LOSS
        assert proxy.num_edited == 1
    placed = await destination.step(placed=all_placed())
    assert placed.status is StepStatus.NEED_SNAPSHOT
    assert placed.error == "block 0 of fetch 1 has not come, or is kept no longer"


async def test_a_source_that_is_killed_or_not_there_is_unavailable(
    folder: Path, services: tuple[Service, Service]
) -> None:
    with worker_process(folder, *SIZES) as dying:
        dying.wait_for("ready")
        async with (
            worker_client(dying.wait_for("listening")["address"]) as source,
            worker_client(services[1].wait_for("listening")["address"]) as destination,
        ):
            await prefill(source)
            come = destination.fetch(source, [1], fetch_id=2)
            await until_come(come, 1)

            def kill_source(data: bytes) -> bytes:
                if source.incarnation.encode() in data:  # the read is on its way
                    dying.kill()
                return data

            async with Proxy(source.address) as proxy:
                proxy.edit("up", kill_source)
                far = WorkerClient(grpc.aio.insecure_channel(proxy.address), proxy.address, source.incarnation)
                call = destination.fetch(far, SOURCE_BLOCKS[:NUM_FULL])
                assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
            assert dying.process.poll() is not None
            assert await code_of(destination.fetch(source, [1], fetch_id=3)) is grpc.StatusCode.UNAVAILABLE
            kept = await destination.step(snapshot=True, placed=[2, 0, 5])
            assert kept.status is StepStatus.OK, "what has come needs its source no longer"


async def test_a_group_of_ranks_and_a_worker_without_memory_for_it_say_that_blocks_do_not_travel(folder: Path) -> None:
    for option in (("--tensor-parallel", "2"), ("--fetch-memory-bytes", "0")):
        with worker_process(folder, *SIZES, *option) as service:
            service.wait_for("ready")
            async with worker_client(service.wait_for("listening")["address"]) as worker:
                pool = (await worker.describe()).pool
                assert (pool.block_format, pool.max_fetched_blocks) == ("", 0)
                refused = grpc.StatusCode.FAILED_PRECONDITION
                assert await code_of(worker.read([0], "")) is refused
                assert await code_of(worker.fetch(worker, [0])) is refused
