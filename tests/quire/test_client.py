"""The synchronous client: the same requests, from threads."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import quire
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer


async def test_every_call_works_without_asyncio(server: ScriptedServer) -> None:
    def use() -> None:
        with quire.Client(server.address) as client:
            client.wait_ready(5)
            completion = client.generate("hello", max_tokens=8)
            assert completion.text == " 0 1 2 3 4 5 6 7"
            assert client.chat([{"role": "user", "content": "Hi"}]).token_ids == tuple(range(8))
            assert client.get(completion.request_id).state is quire.RequestState.FINISHED
            assert client.cancel(completion.request_id) is quire.RequestState.FINISHED
            assert client.tokenize("a b").tokens == ("a", "b")
            assert client.detokenize([1]) == " 1"
            assert client.model().name == "scripted"
            assert client.stats().num_running == 2
            assert client.health() is quire.Health.SERVING
            assert client.attach(completion.request_id, 6).completion().text == " 6 7"

    await asyncio.to_thread(use)


async def test_a_stream_is_an_iterator(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=5, tokens_per_chunk=1)

    def use() -> list[str]:
        with quire.Client(server.address) as client, client.stream("hello") as stream:
            assert stream.accepted().request_id == stream.request_id
            return [chunk.text for chunk in stream]

    assert await asyncio.to_thread(use) == [" 0", " 1", " 2", " 3", " 4"]


async def test_leaving_a_stream_cancels_its_request(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=5, released=1)
    with quire.Client(server.address) as client:

        def use() -> None:
            with client.stream_chat([{"role": "user", "content": "Hi"}], request_id="left") as stream:
                next(stream)

        await asyncio.to_thread(use)
        await server.until(lambda: server.count("cancel", "left") == 1)
        await asyncio.to_thread(client.close)


async def test_threads_share_one_session(server: ScriptedServer) -> None:
    def use() -> set[str]:
        with quire.Client(server.address) as client, ThreadPoolExecutor(8) as pool:
            return {each.text for each in pool.map(client.generate, [f"prompt {i}" for i in range(64)])}

    assert await asyncio.to_thread(use) == {" 0 1 2 3 4 5 6 7"}
    assert server.num_sessions == 1


async def test_errors_come_through_with_their_type(server: ScriptedServer) -> None:
    server.default = Script(refusals=[quire.FailedPreconditionError("the model has no chat template")])

    def use() -> None:
        with quire.Client(server.address) as client, pytest.raises(quire.FailedPreconditionError, match="template"):
            client.generate("hello")

    await asyncio.to_thread(use)


def test_a_closed_client_says_so_and_leaves_no_thread() -> None:
    client = quire.Client("127.0.0.1:1")
    assert any(each.name == "quire-client" for each in threading.enumerate())
    client.close()
    client.close()
    assert not any(each.name == "quire-client" for each in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        client.stats()
