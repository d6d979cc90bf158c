"""Streams of events over real connections: to clients that do not read, behind each other, and over comments."""

import asyncio
import re
from typing import Any

import openai
import orjson
import pytest
from anthropic._streaming import SSEDecoder
from starlette.types import Receive, Scope, Send

from gateway_svc.app import create_app
from gateway_svc.departure import unless_departed
from gateway_svc.event_stream import COMMENT, COMMENT_AMONG_IDS, EventStream, data_event, with_id
from gateway_svc.generation import Generation
from quire.open_request import OpenRequest
from quire.results import Chunk
from quire.stream import CompletionStream
from tests.gateway.raw_http import served, talk
from tests.gateway.scripted_client import Scripted, ScriptedClient, ScriptedSession, chunks_of, outcome
from tests.gateway.wire import texts
from tests.patience import patient

TURNS = [{"role": "user", "content": "x"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/messages": {"messages": TURNS, "max_tokens": 9},
    "/v1/responses": {"input": "x", "store": False},
}


async def test_a_client_that_does_not_read_stops_its_stream_alone_and_gets_all_of_it_later() -> None:
    text, request = "x" * 100_000, OpenRequest("r", from_positions=(), buffer_tokens=4)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        stream = CompletionStream(ScriptedSession(), request, cancels_on_close=True)
        generation = Generation([stream], 1, detaches=False)
        await EventStream(generation, texts(generation))(scope, receive, send)

    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        num_pushed = 0
        async with asyncio.timeout(patient(30)):
            while not request.is_behind:
                request.push_chunk(Chunk(position=request.num_tokens, num_tokens=1, text=text))
                await asyncio.sleep(0)
        num_pushed = request.num_tokens
        received = 0
        while received < num_pushed * len(text):
            received += len(await reader.read(1 << 20))
        assert not request.is_behind
        request.record_outcome(outcome(()))
        assert await reader.read() == b""
        assert received == num_pushed * len(text)
        writer.close()


async def test_requests_of_one_connection_are_answered_in_turn() -> None:
    client = ScriptedClient(Scripted(chunks=chunks_of(["a", "b", "c"])))
    body = b'{"prompt": "x", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    sent = head % len(body) + b"\r\n" + body
    last = head % len(body) + b"connection: close\r\n\r\n" + body
    async with served(create_app(client, max_body_bytes=1 << 10)) as port:
        *answers, rest = (await talk(port, sent * 2 + last)).split(b"0\r\n\r\n")
    assert rest == b""
    assert [each.startswith(b"HTTP/1.1 200") for each in answers] == [True] * 3
    assert [re.findall(rb'"text":"(.)"', each) for each in answers] == [[b"a", b"b", b"c"]] * 3
    assert [each.count(b"data: [DONE]") for each in answers] == [1] * 3


@pytest.mark.parametrize("num_sent", [1, 2])
async def test_a_client_that_leaves_is_missed_by_the_request_being_answered(num_sent: int) -> None:
    """Regression: only the request that came last was told, which waits behind the one being answered."""
    begun, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        begun.set()

        async def piece_by_piece() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
                await asyncio.sleep(0.01)

        await unless_departed(receive, piece_by_piece())  # which goes on for ever
        left.set()

    async with served(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * num_sent)
        async with asyncio.timeout(patient(10)):
            await begun.wait()
            writer.transport.abort()
            await left.wait()


@pytest.mark.parametrize("decoder", [openai._streaming.SSEDecoder, SSEDecoder])
def test_clients_read_over_comments(decoder: type[SSEDecoder]) -> None:
    read = decoder().iter_bytes(iter([COMMENT, data_event(b"1"), COMMENT, data_event(b"2")]))
    assert [each.data for each in read] == ["1", "2"]


@pytest.mark.parametrize("decoder", [openai._streaming.SSEDecoder, SSEDecoder])
def test_clients_read_over_comments_between_events_with_ids(decoder: type[SSEDecoder]) -> None:
    """Regression: OpenAI's takes each blank line for the end of an event once an event had an id."""
    sent = [with_id("0", data_event(b"1")), COMMENT_AMONG_IDS, COMMENT_AMONG_IDS, with_id("1", data_event(b"2"))]
    assert [each.data for each in decoder().iter_bytes(iter(sent))] == ["1", "2"]


class EndlessClient(ScriptedClient):
    """A client whose requests do not end by themselves."""

    def __init__(self, script: Scripted) -> None:
        super().__init__(script)
        self.has_told = asyncio.Event()

    def _go_on(self, request: OpenRequest, number: int) -> None:
        if number < len(self.script.chunks):
            super()._go_on(request, number)
        else:
            self.has_told.set()


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(("on_disconnect", "asked"), [(None, "cancel"), ("cancel", "cancel"), ("continue", "detach")])
async def test_a_request_whose_client_goes_is_left_to_go_on_if_it_says_so(
    path: str, streamed: bool, on_disconnect: str | None, asked: str
) -> None:
    """The same with and without an Idempotency-Key, which is only for clients that come back."""
    client = EndlessClient(Scripted(chunks=chunks_of(["a", "b"], finish=None)))
    body = orjson.dumps(CALLS[path] | {"stream": streamed, "on_disconnect": on_disconnect})
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    async with served(create_app(client, max_body_bytes=1 << 10)) as port, asyncio.timeout(patient(30)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % (path.encode(), len(body)) + body)
        if streamed:
            await reader.readuntil(b"data: ")
        await client.has_told.wait()
        writer.close()
        while not client.session.asked:  # noqa: ASYNC110 - a session has nobody to tell
            await asyncio.sleep(0)
    assert client.session.asked[0] == asked
