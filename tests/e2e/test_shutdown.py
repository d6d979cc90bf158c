"""A scheduler process that is told to end, or must: with requests, with none, without worker, without store."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

import quire
from common.rpc import CLUSTER_MESSAGE_BYTES
from quire.rpc import channel_options
from quire.v1 import cluster_pb2_grpc, worker_pb2
from tests.patience import patient
from tests.scheduler.scripted_worker import Answer, ScriptedWorker
from tests.services import Service, start_scheduler
from tests.valkey import ValkeyProcess


@asynccontextmanager
async def scheduler(*arguments: str) -> AsyncIterator[tuple[Service, str]]:
    service, address = await asyncio.to_thread(start_scheduler, *arguments)
    try:
        yield service, address
    finally:
        await asyncio.to_thread(service.kill)


@asynccontextmanager
async def scripted_worker(address: str, name: str = "w1") -> AsyncIterator[ScriptedWorker]:
    """Registered, until the scheduler drives it, and again and again."""
    worker = ScriptedWorker(name)
    await worker.start()
    async with grpc.aio.insecure_channel(address, options=channel_options(CLUSTER_MESSAGE_BYTES)) as channel:
        keeping = asyncio.create_task(_keep_registered(cluster_pb2_grpc.ClusterStub(channel), worker))
        try:
            yield worker
        finally:
            keeping.cancel()
            await worker.stop()


@asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[tuple[Service, ScriptedWorker, quire.AsyncClient]]:
    """A scheduler, its worker, and a client that soon gives up who went away."""
    async with (
        scheduler(*arguments) as (service, address),
        scripted_worker(address) as worker,
        quire.AsyncClient(address, reconnect_timeout_s=0.1) as client,
    ):
        yield service, worker, client


async def _keep_registered(cluster: "cluster_pb2_grpc.ClusterAsyncStub", worker: ScriptedWorker) -> None:
    while True:
        with suppress(grpc.aio.AioRpcError):
            await cluster.Register(worker.registration(), timeout=patient(2))
        await asyncio.sleep(0.1)


async def ended(service: Service, timeout_s: float) -> int:
    return await asyncio.to_thread(service.wait, timeout_s)


async def started_stream(client: quire.AsyncClient, worker: ScriptedWorker, **params: object) -> quire.CompletionStream:
    """A request on the worker, which holds back its answers from now on."""
    await client.wait_ready(30)
    worker.may_answer.clear()
    stream = client.stream([10], max_tokens=6, request_id="r1", **params)  # type: ignore[arg-type]
    await stream.accepted()
    return stream


async def test_a_scheduler_without_requests_ends_at_once_with_or_without_a_client() -> None:
    async with scheduler() as (service, address), scripted_worker(address):
        async with quire.AsyncClient(address) as client:
            await client.wait_ready(30)
            assert (await client.generate([10], max_tokens=3)).token_ids == (11, 12, 13)
            service.signal(signal.SIGTERM)
            assert await ended(service, 5) == 0
        assert "Traceback" not in "".join(service.raw)


async def test_running_requests_end_before_the_scheduler_and_new_ones_are_refused() -> None:
    async with scheduler() as (service, address), scripted_worker(address) as worker:
        async with quire.AsyncClient(address, retries=0) as client:
            stream = await started_stream(client, worker)
            service.signal(signal.SIGTERM)
            await asyncio.to_thread(service.wait_for, "draining")
            with pytest.raises(quire.UnavailableError, match="shutting down"):
                await client.generate([20], max_tokens=3)
            assert await client.health() is quire.Health.NOT_SERVING
            worker.may_answer.set()
            assert (await stream.completion()).token_ids == (11, 12, 13, 14, 15, 16)
            assert await ended(service, 10) == 0
        assert "Traceback" not in "".join(service.raw)


async def test_what_does_not_end_in_time_is_left_in_the_journal(valkey: ValkeyProcess) -> None:
    async with serving("--store", valkey.url, "--drain-timeout-s", "0.3") as (service, worker, client):
        stream = await started_stream(client, worker)
        service.signal(signal.SIGTERM)
        assert await ended(service, 10) == 0
        left = service.wait_for("requests left unfinished in the journal")
        assert left["live"] == 1
        assert not [line for line in service.lines if line.get("event") == "request ended"]
        with pytest.raises(quire.UnavailableError):
            await stream.completion()


async def test_requests_that_wait_for_a_worker_do_not_keep_a_scheduler_beyond_its_time() -> None:
    async with serving("--drain-timeout-s", "0.3") as (service, worker, client):
        stream = await started_stream(client, worker)
        await worker.stop()
        await asyncio.to_thread(service.wait_for, "worker lost")
        service.signal(signal.SIGTERM)
        assert await ended(service, 10) == 0
        with pytest.raises(quire.UnavailableError):
            await stream.completion()


async def test_a_scheduler_ends_without_its_store(valkey: ValkeyProcess) -> None:
    """The request is computed and cannot be made durable: nobody may see its end."""
    async with serving("--store", valkey.url, "--drain-timeout-s", "0.3") as (service, worker, client):
        stream = await started_stream(client, worker)
        valkey.freeze()
        worker.may_answer.set()
        service.signal(signal.SIGTERM)
        try:
            assert await ended(service, 25) == 0
        finally:
            valkey.thaw()
        assert not [line for line in service.lines if line.get("event") == "request ended"]
        with pytest.raises(quire.UnavailableError):
            await stream.completion()


async def test_a_scheduler_outlives_a_worker_that_claims_to_follow_a_newer_one() -> None:
    """The store knows of none: the worker is put out of service, and the request waits for another."""
    async with scheduler("--drain-timeout-s", "3") as (service, address), scripted_worker(address) as worker:

        def script(request: worker_pb2.StepRequest) -> Answer:
            stale = worker_pb2.STEP_STATUS_STALE_EPOCH
            return worker_pb2.StepResponse(epoch=2**64 - 1, step_id=request.step_id, status=stale)

        worker.script = script
        async with quire.AsyncClient(address) as client:
            await client.wait_ready(30)
            stream = client.stream([10], max_tokens=3)
            await stream.accepted()
            said = await asyncio.to_thread(service.wait_for, "worker out of service")
            assert str(2**64 - 1) in said["reason"]
            assert (await client.stats()).num_waiting == 1
            service.signal(signal.SIGTERM)
            assert await ended(service, 45) == 0


async def test_a_scheduler_that_is_fenced_while_it_drains_ends_at_once(valkey: ValkeyProcess) -> None:
    async with serving("--store", valkey.url, "--drain-timeout-s", "60") as (service, worker, client):
        stream = await started_stream(client, worker)
        service.signal(signal.SIGTERM)
        await asyncio.to_thread(service.wait_for, "draining")
        async with scheduler("--store", valkey.url):
            worker.may_answer.set()  # its tokens meet the newer leader's entry
            assert await ended(service, 15) == 1
        with pytest.raises(quire.UnavailableError):
            await stream.completion()
