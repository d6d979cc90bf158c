"""Requests that have not ended, as the SDK and the command line list, name and cancel them."""

import asyncio
import json
import os
import pty
import re
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

import quire
from quire.cli.app import app
from quire.cli.wait_hint import WaitHint
from quire.v1 import inference_pb2 as pb
from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer
from tests.quire.test_cli import start
from tests.quire.test_deployment import TwoShards, shard_of_call, started

WAITING = Script(num_tokens=4, released=0, waiting_for="a worker: all are draining")


async def shown_on_terminal(line: str) -> str:
    """Run a line of the shell on a terminal of its own; what it shows."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_shell(line, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert await asyncio.wait_for(process.wait(), patient(60)) == 0
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    return shown


async def run(*arguments: str) -> Any:
    """Runs a command; the server answers meanwhile."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments))


async def submitted(server: ScriptedServer, client: quire.AsyncClient, *names: str, **params: Any) -> list[Any]:
    """Streams of requests that say nothing yet."""
    streams = [client.stream(f"{name}", request_id=name, **params) for name in names]
    for stream in streams:
        await stream.accepted()
    return streams


async def test_a_listing_is_plain_data_and_says_what_each_waits_for(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.scripts = {"waits": WAITING, "runs": Script(num_tokens=4, released=2)}
    streams = await submitted(server, client, "waits", "runs", tenant="acme", n=2, priority=1)
    listed = await client.list_requests(tenant="acme")
    assert listed.next_page_token is None
    assert [each.request_id for each in listed.requests] == ["waits", "runs"]
    assert listed.requests[0] == quire.RequestSummary(
        request_id="waits",
        tenant="acme",
        state=quire.LiveState.QUEUED,
        prompt_tokens=3,
        output_tokens=0,
        num_samples=2,
        beam_width=None,
        priority=1,
        age_s=90.0,
        worker_id=None,
        waiting_for="a worker: all are draining",
    )
    assert (listed.requests[1].worker_id, listed.requests[1].waiting_for) == ("w0", None)
    assert (await client.get("waits")).waiting_for == "a worker: all are draining"
    assert (await client.list_requests(tenant="other")).requests == ()
    del streams


async def test_a_listing_takes_one_state_or_several_and_goes_on_where_it_was(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = WAITING
    streams = await submitted(server, client, "a", "b", "c")
    page = await client.list_requests(state="queued", page_size=2)
    assert page.next_page_token is not None
    rest = await client.list_requests(
        state=["queued", quire.LiveState.PAUSED], page_size=2, page_token=page.next_page_token
    )
    assert [each.request_id for each in (*page.requests, *rest.requests)] == ["a", "b", "c"]
    assert [list(each.states) for each in server.listings] == [
        [pb.LIVE_STATE_QUEUED],
        [pb.LIVE_STATE_QUEUED, pb.LIVE_STATE_PAUSED],
    ]
    with pytest.raises(ValueError, match="state is 'waiting': give one of 'entering', 'queued'"):
        await client.list_requests(state="waiting")
    with pytest.raises(quire.InvalidRequestError, match="page_size"):
        await client.list_requests(page_size=-1)
    del streams


def test_every_live_state_of_the_wire_has_one_here() -> None:
    names = {name.removeprefix("LIVE_STATE_") for name in pb.LiveState.keys()}  # noqa: SIM118 - not a mapping
    assert {each.name for each in quire.LiveState} == names - {"UNSPECIFIED"}


async def test_the_synchronous_client_lists_too(server: ScriptedServer) -> None:
    server.default = WAITING

    def use() -> quire.RequestPage:
        with quire.Client(server.address) as client, client.stream("p", request_id="long") as stream:
            stream.accepted()
            return client.list_requests(state="queued")

    page = await asyncio.to_thread(use)
    assert [each.request_id for each in page.requests] == ["long"]


async def test_statistics_tell_the_latency_of_the_last_minute(client: quire.AsyncClient) -> None:
    assert (await client.stats()).latency == quire.LatencyStats(
        num_requests=7,
        first_token_p50_s=0.012,
        first_token_p99_s=0.345,
        token_p50_s=0.0191,
        token_p99_s=0.0252,
    )


async def test_quire_requests_shows_who_waits_for_what(server: ScriptedServer, client: quire.AsyncClient) -> None:
    nothing = await run("requests", "-a", server.address)
    assert (nothing.exit_code, nothing.stdout) == (0, "no request is running or waiting\n")
    server.scripts = {"waits": WAITING, "runs": Script(num_tokens=4, released=2)}
    streams = await submitted(server, client, "waits", "runs")
    shown = (await run("requests", "-a", server.address)).stdout.splitlines()
    assert shown[0].split() == ["request", "state", "prompt", "output", "age", "worker", "waiting", "for"]
    assert shown[1].split() == ["waits", "queued", "3", "0", "2", "min", "a", "worker:", "all", "are", "draining"]
    assert shown[2].split() == ["runs", "running", "3", "2", "2", "min", "w0"]
    del streams


async def test_an_id_is_listed_whole_wherever_the_listing_goes(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    long_id = "chatcmpl-" + "0123456789abcdef" * 2
    server.scripts = {long_id: WAITING}
    streams = await submitted(server, client, long_id)
    command = f"{sys.executable} -m quire.cli requests -a {server.address}"
    for line in (f"{command} | cat", f"FORCE_COLOR=1 {command} | cat", f"stty cols 60; {command}"):
        shown = await shown_on_terminal(line)
        assert long_id in shown
        assert ("a worker: all are draining" in shown) is line.endswith("cat")
    del streams


async def test_a_name_without_room_goes_on_in_the_next_line(server: ScriptedServer, client: quire.AsyncClient) -> None:
    long_id = "request-" + "0123456789" * 10
    server.scripts = {long_id: WAITING}
    streams = await submitted(server, client, long_id)
    shown = await shown_on_terminal(f"stty cols 80; {sys.executable} -m quire.cli requests -a {server.address}")
    assert "queued" in shown and long_id == "".join(re.findall(r"^(?:request-)?\d+", shown, re.MULTILINE))
    del streams


async def test_quire_requests_asks_for_tenant_and_states_and_prints_json(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = WAITING
    streams = await submitted(server, client, "a", "b", tenant="acme")
    result = await run(
        "requests", "-a", server.address, "--tenant", "acme", "--state", "queued", "--state", "paused", "--json"
    )
    assert [json.loads(line)["request_id"] for line in result.stdout.splitlines()] == ["a", "b"]
    assert json.loads(result.stdout.splitlines()[0])["state"] == "queued"
    asked = server.listings[-1]
    assert (asked.tenant, list(asked.states)) == ("acme", [pb.LIVE_STATE_QUEUED, pb.LIVE_STATE_PAUSED])
    none = await run("requests", "-a", server.address, "--tenant", "other")
    assert none.stdout == "no request that is running or waiting matches\n"
    del streams


async def test_quire_requests_lists_no_more_than_its_limit_and_says_so(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = WAITING
    streams = await submitted(server, client, "a", "b", "c")
    result = await run("requests", "-a", server.address, "--limit", "2")
    assert len(result.stdout.splitlines()) == 3
    assert "there are more requests; raise --limit, which is 2" in result.stderr
    assert (await run("requests", "-a", server.address, "--limit", "3")).stderr == ""
    del streams


class Ages(TwoShards):
    """Leader of two shards with so many requests each, the oldest first; a page token is the number already listed."""

    def __init__(self, *ages: list[int]) -> None:
        super().__init__()
        self.ages = ages

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        shard = shard_of_call(context)
        first = int(request.page_token or 0)
        end = first + request.page_size
        ages = self.ages[shard]
        return pb.ListRequestsResponse(
            requests=[
                pb.RequestSummary(request_id=f"s{shard}-{each}", age_ms=each * 1000, state=pb.LIVE_STATE_RUNNING)
                for each in ages[first:end]
            ],
            next_page_token=str(end) if end < len(ages) else "",
        )


@pytest.mark.parametrize(
    ("limit", "ages", "listed", "has_more"),
    [
        (3, ([9, 7, 5, 3], [8, 6]), ["s0-9", "s1-8", "s0-7"], True),
        (6, ([9, 7, 5, 3], [8, 6]), ["s0-9", "s1-8", "s0-7", "s1-6", "s0-5", "s0-3"], False),
        (2, ([9, 7], []), ["s0-9", "s0-7"], False),
        (2, ([], [9, 7, 5]), ["s1-9", "s1-7"], True),
    ],
)
async def test_quire_requests_lists_the_oldest_of_all_shards(
    limit: int, ages: tuple[list[int], ...], listed: list[str], has_more: bool
) -> None:
    async with started(Ages(*ages)) as server:
        result = await run("requests", "-a", server.address, "--limit", str(limit), "--json")
    assert [json.loads(line)["request_id"] for line in result.stdout.splitlines()] == listed
    assert ("there are more requests" in result.stderr) is has_more


async def test_top_shows_the_oldest_requests_of_all_shards() -> None:
    async with started(Ages([], [9, 7])) as server:
        result = await run("top", "--once", "-a", server.address)
    assert re.findall(r"s\d-\d", result.stdout) == ["s1-9", "s1-7"] and "more" not in result.stdout


def test_quire_requests_names_the_flag_of_a_state_that_is_none() -> None:
    result = CliRunner().invoke(app, ["requests", "-a", "127.0.0.1:1", "--state", "waiting"])
    assert result.exit_code == 2
    assert result.stderr.startswith("quire: --state cannot be 'waiting': give one of entering, queued, running")


async def test_quire_cancel_ends_requests_and_names_those_that_are_not_known(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = WAITING
    streams = await submitted(server, client, "a", "b")
    result = await run("cancel", "a", "nobody", "b", "-a", server.address)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == ["a: cancelled", "b: cancelled"]
    assert result.stderr == "quire: no request has the id 'nobody'\n"
    assert (await run("cancel", "a", "-a", server.address)).exit_code == 0
    del streams


async def test_generate_names_its_request_as_soon_as_it_is_accepted(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=4, released=0)
    command = await start("generate", "hello", "-a", server.address, "--stats")
    assert command.stderr is not None
    async with asyncio.timeout(patient(60)):
        name = (await command.stderr.readline()).decode().removeprefix("request ").strip()
        assert list(server.runs) == [name]
        assert (await run("pause", name, "-a", server.address)).stdout == f"{name}: paused\n"
        assert (await run("resume", name, "-a", server.address)).stdout == f"{name}: running\n"
        server.release(name)
        assert b"tokens/s" in await command.stderr.read()
        assert await command.wait() == 0


async def test_generate_takes_an_id(server: ScriptedServer) -> None:
    result = await run("generate", "hello", "-a", server.address, "--request-id", "mine")
    assert (result.exit_code, result.stdout) == (0, " 0 1 2 3 4 5 6 7\n")
    assert list(server.runs) == ["mine"]


async def test_a_person_who_waits_is_told_what_for_until_there_is_output(
    server: ScriptedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    server.default = Script(num_tokens=4, released=0, waiting_for="a worker: all are draining")
    told = "quire: request long waits for a worker: all are draining\n"

    def use() -> str:
        with (
            quire.Client(server.address) as client,
            client.stream("p", request_id="long") as stream,
            WaitHint(client, stream.request_id, every_s=0.01) as hint,
        ):
            stream.accepted()
            shown = ""
            while "\n" not in shown:
                shown += capfd.readouterr().err
            server.runs["long"].script.waiting_for = "KV blocks"
            while shown.count("\n") < 2:
                shown += capfd.readouterr().err
            hint.stop()
            return shown

    async with asyncio.timeout(patient(60)):
        assert await asyncio.to_thread(use) == told + "quire: request long waits for KV blocks\n"


async def test_top_shows_the_oldest_requests(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.default = WAITING
    streams = await submitted(server, client, *(f"request-{number}" for number in range(11)))
    result = await run("top", "--once", "-a", server.address)
    lines = [line.strip("│ ") for line in result.stdout.splitlines()]
    assert "request-0  queued     3+0  2 min  a worker: all are draining" in lines
    assert "request-9  queued     3+0  2 min  a worker: all are draining" in lines
    assert not any(line.startswith("request-10") for line in lines)
    assert "… more: quire requests" in lines
    del streams


@pytest.mark.parametrize("command", ["requests", "generate says", "generate fails"])
async def test_texts_of_others_do_not_control_the_terminal(
    server: ScriptedServer, client: quire.AsyncClient, command: str
) -> None:
    """Regression: a tenant's name, an error and the second set of control characters went there."""
    evil = "\x1b[2J\x1b]0;title\x07\x9b31m"
    server.scripts = {
        "listed": Script(num_tokens=4, released=0, waiting_for=f"a worker{evil}"),
        "says": Script(num_tokens=1, before=evil),
        "fails": Script(num_tokens=1, state=pb.REQUEST_STATE_FAILED, error=f"lost{evil}"),
    }
    streams = await submitted(server, client, "listed", tenant=f"acme{evil}\nanother row")
    shown = await shown_on_terminal(f"stty cols 200; {sys.executable} -m quire.cli {command} -a {server.address}; true")
    del streams
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)  # our own colours
    assert "�[2J" in plain
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", plain)
    assert not re.search("^another", plain, re.MULTILINE)
