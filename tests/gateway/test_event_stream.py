"""Streams of events as an ASGI application: comments while nothing comes, and the end of what makes the events."""

import asyncio
from collections.abc import AsyncGenerator

import openai
import pytest
from anthropic._streaming import SSEDecoder
from starlette.types import Message

from gateway_svc.event_stream import EventStream, data_event

COMMENT = b": waiting\n\n"
SCOPE = {"type": "http", "method": "POST", "path": "/"}


class Client:
    """One side of a connection, which stays open until `left` is set."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.bodies: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            await self.bodies.put(message["body"])

    async def next_event(self) -> bytes:
        """The next piece that is no comment."""
        while (body := await self.bodies.get()) == COMMENT:
            pass
        return body


async def test_a_stream_without_events_says_that_it_waits() -> None:
    client, turn = Client(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        yield data_event(b"1")
        await turn.wait()
        yield data_event(b"2")

    answering = asyncio.create_task(EventStream(events(), silence_s=0.01)(SCOPE, client.receive, client.send))
    assert await client.next_event() == data_event(b"1")
    assert [await client.bodies.get() for _ in range(3)] == [COMMENT] * 3
    turn.set()
    assert await client.next_event() == data_event(b"2")
    await answering
    rest = [client.bodies.get_nowait() for _ in range(client.bodies.qsize())]
    assert rest[-1] == b""  # nothing follows the end
    assert set(rest[:-1]) <= {COMMENT}


async def test_a_stream_that_goes_on_has_no_comments() -> None:
    client = Client()

    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(1000):
            yield b"x"
            await asyncio.sleep(0)

    await EventStream(events())(SCOPE, client.receive, client.send)
    assert [client.bodies.get_nowait() for _ in range(client.bodies.qsize())] == [b"x"] * 1000 + [b""]


async def test_a_reader_that_leaves_while_the_stream_waits_ends_it() -> None:
    client, has_ended = Client(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            has_ended.set()

    answering = asyncio.create_task(EventStream(events(), silence_s=0.01)(SCOPE, client.receive, client.send))
    assert await client.bodies.get() == COMMENT
    client.left.set()
    await answering
    assert has_ended.is_set()


@pytest.mark.parametrize("decoder", [openai._streaming.SSEDecoder, SSEDecoder])
def test_clients_read_over_comments(decoder: type[SSEDecoder]) -> None:
    read = decoder().iter_bytes(iter([COMMENT, data_event(b"1"), COMMENT, data_event(b"2")]))
    assert [each.data for each in read] == ["1", "2"]
