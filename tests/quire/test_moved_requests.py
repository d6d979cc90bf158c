"""Requests that a shard refuses since the number of shards changes: placed anew, within limits, and handled there."""

import asyncio
import gc
import weakref

import pytest

import quire
from quire.errors import ShardsChangedError, from_status, to_status
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer


def refusals(number: int) -> list[quire.QuireError]:
    return [ShardsChangedError("the number changes", 0.01) for _ in range(number)]


async def test_a_refused_request_is_placed_again_until_a_shard_takes_it(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=4, refusals=refusals(9))
    async with quire.AsyncClient(server.address, retries=0) as client:
        output = await client.generate("hello", request_id="ours")
    assert output.usage.completion_tokens == 4 and server.count("submit", "ours") == 10


async def test_one_that_no_shard_takes_fails_after_the_time_for_a_lost_server(server: ScriptedServer) -> None:
    server.default = Script(refusals=refusals(10_000))
    async with quire.AsyncClient(server.address, reconnect_timeout_s=0.2) as client:
        with pytest.raises(quire.UnavailableError, match="the number changes"):
            await client.generate("hello", request_id="ours")


@pytest.mark.parametrize("action", ["cancel", "detach"])
async def test_what_was_placed_anew_is_cancelled_and_left_where_it_is(server: ScriptedServer, action: str) -> None:
    server.default = Script(num_tokens=8, released=2, refusals=refusals(1))
    async with quire.AsyncClient(server.address) as client:
        stream = client.stream("hello", request_id="ours")
        await stream.accepted()
        if action == "cancel":
            await stream.aclose()
        else:
            stream.detach()
        await server.until(lambda: server.count(action, "ours") == 1)


async def test_a_slow_reader_of_a_request_placed_anew_gets_all_of_it(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=500, tokens_per_chunk=1, refusals=refusals(1))
    async with quire.AsyncClient(server.address, buffer_tokens=16) as client:
        stream = client.stream("hello", request_id="ours")
        await stream.accepted()
        assert (await client.generate("another", max_tokens=1)).usage.completion_tokens == 500
        chunks = [chunk async for chunk in stream]  # only now is it read
    assert [chunk.position for chunk in chunks] == list(range(500)) and server.count("attach", "ours") >= 1


async def test_a_slow_reader_of_a_request_placed_anew_and_given_up_gets_the_reason(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=500, released=100, tokens_per_chunk=1, refusals=refusals(1))
    async with quire.AsyncClient(server.address, buffer_tokens=16, reconnect_timeout_s=0.3) as client:
        stream = client.stream("hello", request_id="ours", timeout_s=0.5)
        await stream.accepted()
        await asyncio.sleep(2.0)
        with pytest.raises(quire.QuireError):
            _ = [chunk async for chunk in stream]


def test_the_version_of_a_refusal_survives_the_wire() -> None:
    error = from_status(to_status(ShardsChangedError("changes", 0.25, version=7)))
    assert isinstance(error, ShardsChangedError) and (error.version, error.retry_after_s) == (7, 0.25)
    status = to_status(error)
    status.details[0].value = status.details[0].value.replace(b"7", b"x")
    damaged = from_status(status)
    assert isinstance(damaged, ShardsChangedError) and damaged.version == 0


async def test_requests_that_were_placed_anew_are_not_kept_once_they_have_ended(server: ScriptedServer) -> None:
    """Regression: a client kept each of them, with its prompt, as long as it lived."""
    ended: list[weakref.ref[object]] = []
    async with quire.AsyncClient(server.address) as client:
        for number in range(5):
            server.default = Script(num_tokens=2, refusals=refusals(1))
            stream = client.stream("hello", request_id=f"moved-{number}")
            ended.append(weakref.ref(stream._request))
            await stream.completion()
            del stream
        server.default = Script(refusals=[*refusals(1), quire.InvalidRequestError("no")])
        stream = client.stream("hello", request_id="refused")
        ended.append(weakref.ref(stream._request))
        with pytest.raises(quire.InvalidRequestError):
            await stream.completion()
        del stream
        await asyncio.sleep(0)
        gc.collect()
        assert [each() for each in ended] == [None] * 6
