"""Pauses, as the SDK and the command line see them."""

import asyncio
from typing import Any

import pytest
from typer.testing import CliRunner

import quire
from quire.cli.app import app
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer


async def run(*arguments: str) -> Any:
    """Runs a command; the server answers meanwhile."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments))


async def test_a_paused_request_shows_its_state_and_its_stream_waits(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = Script(num_tokens=4, released=2)
    stream = client.stream("p", request_id="long")
    assert (await anext(stream)).num_tokens == 2
    assert await client.pause("long") is quire.RequestState.PAUSED
    assert (await client.get("long")).state is quire.RequestState.PAUSED
    assert not quire.RequestState.PAUSED.is_terminal
    assert await client.resume("long") is quire.RequestState.RUNNING
    server.release("long")
    assert (await stream.completion()).text == " 0 1 2 3"
    with pytest.raises(quire.FailedPreconditionError, match="has ended"):
        await client.pause("long")
    with pytest.raises(quire.NotFoundError, match="nobody"):
        await client.resume("nobody")
    assert (await client.stats()).num_paused == 3


async def test_what_is_kept_of_a_paused_request_is_the_callers_choice(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = Script(num_tokens=4, released=0)
    stream = client.stream("p", request_id="long")
    await stream.accepted()
    await client.pause("long", keep="tokens")
    await client.pause("long", keep="auto")
    with pytest.raises(ValueError, match="give one of 'auto', 'tokens'"):
        await client.pause("long", keep="nothing")  # type: ignore[arg-type]
    asked = [action for action, _ in server.received if action.startswith("Pause")]
    assert asked == ["Pause PAUSE_KEEP_TOKENS", "Pause PAUSE_KEEP_AUTO"]


async def test_the_synchronous_client_pauses_and_resumes(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=4, released=2)

    def use() -> list[quire.RequestState]:
        with quire.Client(server.address) as client, client.stream("p", request_id="long") as stream:
            stream.accepted()
            return [client.pause("long"), client.resume("long")]

    assert await asyncio.to_thread(use) == [quire.RequestState.PAUSED, quire.RequestState.RUNNING]


async def test_the_commands_say_where_the_request_stands(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.default = Script(num_tokens=4, released=2)
    stream = client.stream("p", request_id="long")
    await stream.accepted()
    result = await run("pause", "long", "-a", server.address)
    assert (result.exit_code, result.stdout) == (0, "long: paused\n")
    result = await run("pause", "long", "--tokens-only", "-a", server.address)
    assert server.received[-1][0] == "Pause PAUSE_KEEP_TOKENS"
    result = await run("resume", "long", "-a", server.address)
    assert (result.exit_code, result.stdout) == (0, "long: running\n")
    result = await run("pause", "nobody", "-a", server.address)
    assert result.exit_code == 1 and "nobody" in result.stderr
