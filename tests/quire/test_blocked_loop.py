"""A program may block the event loop of its client for long: what servers have said meanwhile still counts."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

import quire
from quire import servers, session
from quire.v1 import inference_pb2 as pb
from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer


class Program:
    """A program in another event loop than the server's, which is blocked when it says so, until it is let go."""

    def __init__(self) -> None:
        self._is_blocked, self._may_go_on = threading.Event(), threading.Event()

    def block(self) -> None:
        self._is_blocked.set()
        self._may_go_on.wait()

    @asynccontextmanager
    async def blocked(self) -> AsyncIterator[None]:
        """From the moment at which it is blocked; it goes on afterwards."""
        try:
            assert await asyncio.to_thread(self._is_blocked.wait, patient(20))
            yield
        finally:
            self._may_go_on.set()


def run_elsewhere(program: Callable[[], Coroutine[Any, Any, Any]]) -> "asyncio.Task[Any]":
    return asyncio.create_task(asyncio.to_thread(asyncio.run, program()))


async def test_a_request_that_finished_before_its_deadline_is_no_expired_one(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "DEADLINE_SLACK_S", patient(1.0))
    server.default = Script(num_tokens=6, released=3)
    program, deadline_s = Program(), patient(1.0)

    async def read() -> str:
        async with quire.AsyncClient(server.address) as client:
            stream = client.stream("hello", request_id="long", timeout_s=deadline_s)
            texts = [(await anext(stream)).text]
            program.block()
            return "".join([*texts, *[chunk.text async for chunk in stream]])

    reading = run_elsewhere(read)
    async with program.blocked():
        server.release("long")
        await asyncio.sleep(deadline_s + session.DEADLINE_SLACK_S + 2 * session.BLOCKED_S)
    assert await reading == "".join(f" {i}" for i in range(6))
    assert server.count("cancel", "long") == 0


class ReachedUnheard:
    """A channel whose server is reached at once, of which its waiter does not hear."""

    def __init__(self) -> None:
        self._state = grpc.ChannelConnectivity.CONNECTING

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        self._state = grpc.ChannelConnectivity.READY
        await asyncio.Event().wait()


async def test_a_server_that_was_reached_meanwhile_counts_as_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_CONNECT_S", 0.01)
    assert await servers._is_ready(cast(grpc.aio.Channel, ReachedUnheard()))


class LateServer(ScriptedServer):
    """A server that answers on a session when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_say = asyncio.Event()

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SessionResponse]:
        async for response in super().Session(request_iterator, context):
            await self.may_say.wait()
            yield response


async def test_what_a_server_answers_meanwhile_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the stream of all requests was left for another connection before the answers were read."""
    answer_s = patient(1.0)
    monkeypatch.setattr("quire.silence.ANSWER_S", answer_s)
    server = LateServer()
    await server.start()
    program, has_come = Program(), threading.Event()

    async def read() -> str:
        async with quire.AsyncClient(server.address) as client:
            stream = client.stream("hello", request_id="heard")
            await asyncio.to_thread(has_come.wait)
            program.block()
            return (await stream.completion()).text

    reading = run_elsewhere(read)
    try:
        await server.until(lambda: server.count("submit", "heard") == 1)
        has_come.set()
        async with program.blocked():
            server.may_say.set()
            await asyncio.sleep(answer_s + 2 * session.BLOCKED_S)
        assert await reading == " 0 1 2 3 4 5 6 7"
        assert server.num_sessions == 1
    finally:
        has_come.set()
        server.may_say.set()
        await server.stop()
