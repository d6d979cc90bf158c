"""Clients that do not know yet which shards there are: their requests wait a moment, and can be given up meanwhile."""

import asyncio
from collections.abc import AsyncIterator

import pytest

import quire
from quire import deployment
from quire.shards import session_number
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer


@pytest.fixture
async def silent(server: ScriptedServer) -> AsyncIterator[ScriptedServer]:
    """Server that does not say which shards there are."""
    server.may_tell_shards.clear()
    server.default = Script(num_tokens=2)
    yield server
    server.may_tell_shards.set()


async def test_a_request_is_sent_when_the_shards_are_known(silent: ScriptedServer) -> None:
    async with quire.AsyncClient(silent.address) as client:
        stream = client.stream("hello", request_id="first")
        await asyncio.sleep(0.1)
        assert silent.count("submit", "first") == 0
        silent.may_tell_shards.set()
        assert (await stream.completion()).usage.completion_tokens == 2


async def test_a_server_that_never_says_counts_as_one_shard(
    silent: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_ASK_S", 0.2)
    async with quire.AsyncClient(silent.address) as client:
        assert (await client.generate("hello")).usage.completion_tokens == 2
        assert (await client.stats()).workers


async def test_the_first_request_of_a_session_names_it_in_its_id_until_the_shards_are_known(
    silent: ScriptedServer,
) -> None:
    async with quire.AsyncClient(silent.address) as client:
        stream = client.stream("hello", session_key="mine", tenant="acme")
        assert stream.request_id.startswith(f"k{session_number('mine', 'acme'):04x}-")
        made = client.new_request_id(session_key="mine", tenant="acme", prefix="msg_")
        assert made.startswith(f"msg_k{session_number('mine', 'acme'):04x}-")
        silent.may_tell_shards.set()
        await stream.completion()
        assert "-" not in (await client.generate("hello", session_key="mine")).request_id  # there is one shard
        with pytest.raises(quire.InvalidRequestError, match=r"^session_key: cannot be 5: give a text"):
            await client.generate("hello", session_key=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["close", "detach", "aclose"])
async def test_what_was_not_sent_yet_can_be_given_up(silent: ScriptedServer, how: str) -> None:
    client = quire.AsyncClient(silent.address)
    stream = client.stream("hello", request_id="given-up")
    reading = asyncio.create_task(stream.completion())
    await asyncio.sleep(0)
    if how == "close":
        await client.close()
    elif how == "detach":
        stream.detach()
    else:
        await stream.aclose()
    with pytest.raises(quire.RequestCancelledError):
        await reading
    silent.may_tell_shards.set()
    await client.close()
    assert silent.count("submit", "given-up") == 0
