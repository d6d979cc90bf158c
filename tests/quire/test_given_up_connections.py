"""Calls and streams over a connection that was given up for new ones, until it is closed; and calls beside a close."""

import asyncio
import subprocess
import sys

import pytest

import quire
from quire import servers
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
