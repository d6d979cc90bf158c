"""Pins, as the SDK and the command line see them."""

import asyncio
from typing import Any

import pytest
from typer.testing import CliRunner

import quire
from quire.cli.app import app
from tests.quire.scripted_server import ScriptedServer

TEXT = " ".join(f"word{i}" for i in range(35))  # 35 tokens to the scripted server: two blocks of 16


async def run(*arguments: str, stdin: str | None = None) -> Any:
    """Runs a command; the server answers meanwhile."""
    return await asyncio.to_thread(CliRunner().invoke, app, ["prefix", *arguments], input=stdin)


async def test_a_prefix_is_pinned_once_and_listed_until_it_is_unpinned(client: quire.AsyncClient) -> None:
    pinned = await client.pin_prefix("system", TEXT, cache_salt="pepper")
    assert pinned == quire.PinnedPrefix(
        name="system",
        tenant="",
        cache_salt="pepper",
        num_tokens=32,
        num_blocks=2,
        worker_ids=("w0",),
        created=True,
    )
    assert not (await client.pin_prefix("system", TEXT, cache_salt="pepper")).created
    with pytest.raises(quire.AlreadyExistsError, match="another prefix"):
        await client.pin_prefix("system", TEXT + " more", cache_salt="pepper")
    assert [each.name for each in await client.list_prefixes()] == ["system"]
    await client.unpin_prefix("system")
    assert await client.list_prefixes() == ()
    with pytest.raises(quire.NotFoundError, match="system"):
        await client.unpin_prefix("system")


async def test_a_prefix_is_text_tokens_or_messages(server: ScriptedServer, client: quire.AsyncClient) -> None:
    await client.pin_prefix("text", TEXT)
    await client.pin_prefix("tokens", range(16))
    messages: list[quire.ChatMessage | dict[str, str]] = [
        {"role": "system", "content": TEXT},
        quire.ChatMessage("user", "Hi"),
    ]
    await client.pin_prefix("chat", messages)
    sent = {name: request for (_, name), request in server.prefixes.requests.items()}

    assert sent["text"].text == TEXT
    assert list(sent["tokens"].token_ids.ids) == list(range(16))
    assert [each.role for each in sent["chat"].chat.messages] == ["system", "user"]
    assert not sent["chat"].chat.HasField("add_generation_prompt")  # the server's default for a prefix
    with pytest.raises(TypeError, match="not a mixture"):
        await client.pin_prefix("both", [1, *messages])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not bytes"):
        await client.pin_prefix("bytes", b"hello")
    with pytest.raises(quire.InvalidRequestError, match="prefix"):
        await client.pin_prefix("large", "x" * (17 * 1024 * 1024))


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), 1e12, 0, -1])
async def test_a_time_that_cannot_be_waited_for_is_refused_by_name(client: quire.AsyncClient, timeout_s: float) -> None:
    """Regression: gRPC took an endless one for one that was over, and the server for one that did not answer."""
    with pytest.raises(ValueError, match=r"^timeout_s must be above 0"):
        await client.pin_prefix("system", TEXT, timeout_s=timeout_s)


async def test_each_tenant_has_pins_of_its_own(client: quire.AsyncClient) -> None:
    await client.pin_prefix("system", TEXT, tenant="acme")
    assert await client.list_prefixes() == ()
    assert [each.tenant for each in await client.list_prefixes(tenant="acme")] == ["acme"]
    with pytest.raises(quire.NotFoundError):
        await client.unpin_prefix("system")
    await client.unpin_prefix("system", tenant="acme")


async def test_a_pin_refused_for_now_is_asked_again(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.refuse_calls = [quire.OverloadedError("the memory is promised to requests", 0.01) for _ in range(2)]
    assert (await client.pin_prefix("system", TEXT)).created
    assert server.count("PinPrefix", "system") == 3


async def test_pins_work_without_asyncio(server: ScriptedServer) -> None:
    def use() -> None:
        with quire.Client(server.address) as client:
            assert client.pin_prefix("system", TEXT).created
            assert [each.num_tokens for each in client.list_prefixes()] == [32]
            client.unpin_prefix("system")
            assert client.list_prefixes() == ()

    await asyncio.to_thread(use)


async def test_the_command_pins_lists_and_unpins(server: ScriptedServer) -> None:
    at = ("-a", server.address)
    assert (await run("list", *at)).stdout == "no prefix is pinned\n"
    result = await run("pin", "system", "-", *at, "--cache-salt", "pepper", stdin=TEXT)
    assert (result.exit_code, result.stdout) == (0, "system: 32 tokens in 2 blocks are pinned\n")
    again = await run("pin", "system", TEXT, *at, "--cache-salt", "pepper")
    assert again.stdout == "system: 32 tokens in 2 blocks are pinned already\n"
    shown = (await run("list", *at)).stdout.splitlines()
    assert [each.split() for each in shown] == [
        ["name", "tokens", "blocks", "salt", "workers"],
        ["system", "32", "2", "pepper", "w0"],
    ]
    assert (await run("unpin", "system", *at)).exit_code == 0
    gone = await run("unpin", "system", *at)
    assert (gone.exit_code, len(gone.stderr.splitlines())) == (1, 1)
    short = await run("pin", "short", "too short", *at)
    assert (short.exit_code, short.stderr) == (2, "quire: prefix: must be at least 16 tokens\n")
