"""Calls and streams over a connection that was given up for new ones, until it is closed; and calls beside a close."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

import quire
from quire import servers
from quire.v1 import inference_pb2 as pb
from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer

SOON_S = 0.3


async def give_up_connection(server: ScriptedServer, client: quire.AsyncClient) -> None:
    """Have a call of the client fail by its time: later calls get a connection of their own."""
    server.may_answer.clear()
    with pytest.raises(quire.UnavailableError, match="did not answer in time"):
        await client.stats()
    server.may_answer.set()


async def test_a_stream_goes_on_when_its_connection_is_closed_for_good(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the session's task was cancelled by gRPC, and the stream waited for ever."""
    monkeypatch.setattr(servers, "_RETIRED_S", SOON_S)
    server.default = Script(num_tokens=5, released=2, tokens_per_chunk=1)
    async with quire.AsyncClient(server.address, call_timeout_s=0.2) as client, asyncio.timeout(patient(20)):
        stream = client.stream("hello", request_id="lasting")
        assert [(await anext(stream)).text, (await anext(stream)).text] == [" 0", " 1"]
        await give_up_connection(server, client)
        await server.until(lambda: server.num_sessions >= 2)
        server.release("lasting")
        assert [chunk.text async for chunk in stream] == [" 2", " 3", " 4"]


async def test_a_call_that_waits_longer_than_its_connection_is_made_again(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the caller got CancelledError, though nobody had cancelled it."""
    monkeypatch.setattr(servers, "_RETIRED_S", SOON_S)
    async with quire.AsyncClient(server.address, call_timeout_s=60) as client, asyncio.timeout(patient(20)):
        await client.model()
        server.may_answer.clear()
        waiting = asyncio.create_task(client.stats())
        await server.until(lambda: server.num_looks == 1)
        connection = client._deployed().first
        connection._servers.renew_connection(connection._servers.current_channel)
        await server.until(lambda: server.num_looks == 2)
        server.may_answer.set()
        assert (await waiting).num_running == 2


async def test_a_call_that_waits_for_its_answer_is_told_that_its_client_is_closed(server: ScriptedServer) -> None:
    """Regression: it was cancelled, so that a TaskGroup took it for done."""
    server.may_answer.clear()
    client = quire.AsyncClient(server.address)
    async with asyncio.timeout(patient(20)):
        waiting = asyncio.create_task(client.stats())
        await server.until(lambda: server.num_looks == 1)
        await client.close()
        with pytest.raises(RuntimeError, match="the client is closed"):
            await waiting


async def test_a_call_whose_client_is_closed_at_once_is_told_so(server: ScriptedServer) -> None:
    """Regression: it waited for ever for who would say which shards there are."""
    client = quire.AsyncClient(server.address)
    async with asyncio.timeout(patient(20)):
        told, _ = await asyncio.gather(client.model(), client.close(), return_exceptions=True)
    assert isinstance(told, RuntimeError) and "closed" in str(told)


async def test_a_stream_that_is_left_at_once_leaves_nothing_unawaited() -> None:
    """Regression: a warning of a coroutine that was never awaited."""
    program = """
import asyncio
import quire
async def leave():
    async with quire.AsyncClient("127.0.0.1:1") as client, client.stream("hello"):
        pass
asyncio.run(leave())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), patient(60))
    assert (process.returncode, errors) == (0, b"")


async def test_a_client_that_was_used_in_an_event_loop_that_is_closed_can_be_closed(server: ScriptedServer) -> None:
    def use() -> None:
        client = quire.AsyncClient(server.address)
        asyncio.run(client.generate("hello"))
        asyncio.run(client.close())

    await asyncio.to_thread(use)


class BreakingCalls(ScriptedServer):
    """A server whose first calls for the model break on their way, as gRPC reports a stream that a proxy resets."""

    num_breaks = 0  # to come
    num_asked = 0

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        self.num_asked += 1
        if self.num_breaks:
            self.num_breaks -= 1
            await context.abort(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2")
        return await super().GetModel(request, context)


@pytest.fixture
async def breaking() -> AsyncIterator[BreakingCalls]:
    server = BreakingCalls()
    await server.start()
    yield server
    await server.stop()


async def test_a_call_that_breaks_on_its_way_is_made_again(breaking: BreakingCalls) -> None:
    """Regression: the caller was told that a request had failed which no server had accepted."""
    breaking.num_breaks = 2
    async with quire.AsyncClient(breaking.address, connect_timeout_s=patient(10)) as client:
        assert (await client.model()).name == "scripted"
    assert breaking.num_asked == 3


async def test_a_call_that_breaks_again_and_again_counts_as_one_that_reaches_no_server(breaking: BreakingCalls) -> None:
    breaking.num_breaks = 1_000_000
    async with quire.AsyncClient(breaking.address, connect_timeout_s=0.3) as client:
        with pytest.raises(quire.UnavailableError, match="breaks on its way: Received RST_STREAM"):
            await client.model()


class LargeAnswers(ScriptedServer):
    """A server whose records are larger than a message may be."""

    num_asked = 0

    async def GetRequest(self, request: pb.GetRequestRequest, context: Any) -> pb.GetRequestResponse:
        self.num_asked += 1
        return pb.GetRequestResponse(request_id="long", samples=[pb.SampleOutput(text="x" * (17 << 20))])


async def test_what_no_message_holds_is_told_at_once_and_over_the_connection_that_there_is() -> None:
    """Regression: it counted as a server that is overloaded, and was asked for again over one connection more."""
    server = LargeAnswers()
    await server.start()
    try:
        async with quire.AsyncClient(server.address) as client:
            await client.model()
            assert client._deployment is not None
            servers = client._deployment.first._servers
            channel = servers.current_channel
            with pytest.raises(quire.InvalidRequestError, match=r"has 17,825,\d+ bytes: give at most 16,777,216"):
                await client.tokenize("x" * (17 << 20))
            with pytest.raises(quire.FailedPreconditionError, match=r"larger than the 16 MiB .* by `attach`"):
                await client.get("long")
            assert (server.num_asked, servers.current_channel) == (1, channel)
    finally:
        await server.stop()


async def test_a_fault_of_the_server_itself_is_told_at_once(breaking: BreakingCalls) -> None:
    breaking.refuse_calls.append(quire.QuireError("a fault of ours"))
    async with quire.AsyncClient(breaking.address) as client:
        with pytest.raises(quire.QuireError, match="a fault of ours") as caught:
            await client.model()
    assert type(caught.value) is quire.QuireError and breaking.num_asked == 1
