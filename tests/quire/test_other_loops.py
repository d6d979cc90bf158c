"""A client and its streams belong to the event loop of the first call: elsewhere they are refused, and do not hang."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

import quire
from quire.stream import CompletionStream
from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def closed(client: quire.AsyncClient, stream: CompletionStream) -> None:
    await client.close()


async def left(client: quire.AsyncClient, stream: CompletionStream) -> None:
    await stream.aclose()


async def detached(client: quire.AsyncClient, stream: CompletionStream) -> None:
    stream.detach()


@pytest.mark.parametrize("act", [closed, left, detached])
async def test_what_is_closed_in_another_loop_is_refused(
    server: ScriptedServer, act: Callable[[quire.AsyncClient, CompletionStream], Awaitable[None]]
) -> None:
    """Regression: closing the client waited for ever."""
    server.default = Script(num_tokens=3, released=1)
    client = quire.AsyncClient(server.address)

    async def begin() -> CompletionStream:
        stream = client.stream("hello", request_id="ours")
        await stream.accepted()
        return stream

    with running_loop() as loop:
        stream = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(begin(), loop))
        with pytest.raises(RuntimeError, match="event loop"):
            await asyncio.wait_for(act(client, stream), patient(20))
        assert server.count("cancel", "ours") == 0
        server.release("ours")
        output = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(stream.completion(), loop))
        assert output.text == " 0 1 2"
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(client.close(), loop))
