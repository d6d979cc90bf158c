"""Callers that leave while their call is under way: others on the same connection do not pay for it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

import quire
from common.limits import LimitsInterceptor
from common.peer_limits import EdgeLimits, PeerConnection, PeerLimits
from common.rpc import EdgeInterceptor
from quire import abandoned_calls
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer


class SlowTokenizer(ScriptedServer):
    """A server whose tokenizer waits for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.may_tokenize = asyncio.Event()
        self.num_begun = self.num_cancelled = self.num_done = 0

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self.num_begun += 1
        try:
            await self.may_tokenize.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.num_done += 1
        return await super().Tokenize(request, context)


@asynccontextmanager
async def slow_tokenizer() -> AsyncIterator[tuple[SlowTokenizer, list[str]]]:
    """The server behind the limits of an edge, and the reasons why it would cut connections."""
    server, cuts = SlowTokenizer(), list[str]()

    def cut(connection: PeerConnection, reason: str) -> None:
        cuts.append(reason)

    peers = PeerLimits(EdgeLimits(max_cancel_rate=1.0), cut=cut)
    edge = grpc.aio.server(interceptors=[LimitsInterceptor(peers), EdgeInterceptor()])
    inference_pb2_grpc.add_InferenceServicer_to_server(server, edge)
    server.address = f"127.0.0.1:{edge.add_insecure_port('127.0.0.1:0')}"
    await edge.start()
    try:
        yield server, cuts
    finally:
        server.may_tokenize.set()
        server.break_sessions()
        await edge.stop(0)


async def until(condition: Any) -> None:
    async with asyncio.timeout(patient(20)):
        while not condition():  # noqa: ASYNC110 - calls that begin or end have no event
            await asyncio.sleep(0.01)


async def leave(calls: Sequence["asyncio.Task[Any]"]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


async def test_callers_that_leave_do_not_cut_the_stream_of_the_others() -> None:
    """A gateway has one connection for all. Regression: each departure was a cancellation on it, and few may be."""
    async with slow_tokenizer() as (server, cuts), quire.AsyncClient(server.address) as client:
        server.default = Script(num_tokens=6, released=3)
        stream = client.stream("hello", request_id="lasting")
        first = await anext(stream)
        calls = [asyncio.create_task(client.tokenize("a text")) for _ in range(30)]
        await until(lambda: server.num_begun == 30)
        await leave(calls)
        for _ in range(3):
            await client.detokenize([1])  # behind any cancellation, on the same connection
        server.may_tokenize.set()
        await until(lambda: server.num_done == 30)
        server.release("lasting")
        assert first.text + "".join([chunk.text async for chunk in stream]) == " 0 1 2 3 4 5"
        assert (server.num_cancelled, server.num_sessions, cuts) == (0, 1, [])


async def test_only_so_many_go_on_without_their_callers_and_none_after_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(abandoned_calls, "MOST", 2)
    async with slow_tokenizer() as (server, _):
        async with quire.AsyncClient(server.address) as client:
            calls = [asyncio.create_task(client.tokenize("a text")) for _ in range(5)]
            await until(lambda: server.num_begun == 5)
            await leave(calls)
            await until(lambda: server.num_cancelled == 3)
        await until(lambda: server.num_cancelled == 5)
