"""A client of several servers finds the one that leads, and the next one that does."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import pytest

import quire
from common.serving import GrpcServer
from quire import servers
from quire.credentials import Credentials
from quire.rpc import PUBLIC_MESSAGE_BYTES
from scheduler_svc.api.leader_gate import LeaderGate
from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer
from tests.services import free_address

INFERENCE = "quire.v1.Inference"


class CountingGate(LeaderGate):
    """Knows how many calls it was asked for."""

    def __init__(self) -> None:
        super().__init__((INFERENCE,))
        self.num_calls = 0
        self.was_asked = asyncio.Event()

    def service(self, handler_call_details: Any) -> Any:
        self.num_calls += 1
        self.was_asked.set()
        return super().service(handler_call_details)


class Standby:
    """Refuses every call as a scheduler does that does not lead."""

    def __init__(self) -> None:
        self.gate = CountingGate()
        self._server = GrpcServer((INFERENCE,), PUBLIC_MESSAGE_BYTES)
        self._server.grpc.add_generic_rpc_handlers((self.gate,))
        self.address = self._server.bind("127.0.0.1:0")

    async def start(self) -> None:
        await self._server.start()
        self._server.set_serving("", True)

    async def stop(self) -> None:
        await self._server.stop(0)


@pytest.fixture
async def standby() -> AsyncIterator[Standby]:
    standby = Standby()
    await standby.start()
    yield standby
    await standby.stop()


async def test_the_server_that_leads_is_found_among_several(server: ScriptedServer, standby: Standby) -> None:
    nobody = free_address()
    async with quire.AsyncClient(f"{nobody},{standby.address}, {server.address}") as client:
        await client.wait_ready(30)
        assert (await client.generate("hello")).text
        assert (await client.model()).name
        assert await client.health() is quire.Health.SERVING


async def test_a_standby_is_asked_once_and_its_word_taken(server: ScriptedServer, standby: Standby) -> None:
    """Requests and calls, each by a client that knows the standby alone."""
    standby.gate.set_leader(server.address)
    async with quire.AsyncClient(standby.address) as client:
        assert (await client.generate("hello")).text
    with quire.Client(standby.address) as client:
        assert await asyncio.to_thread(client.model)


async def test_whoever_waits_for_readiness_at_a_standby_is_sent_to_its_leader(
    server: ScriptedServer, standby: Standby
) -> None:
    async with quire.AsyncClient(standby.address) as client:
        with pytest.raises(quire.UnavailableError, match="not ready after"):
            await client.wait_ready(0.3)
        standby.gate.set_leader(server.address)
        await client.wait_ready(30)
        assert await client.health() is quire.Health.SERVING


async def asks_about_the_model(client: quire.AsyncClient) -> object:
    return await client.model()


async def generates(client: quire.AsyncClient) -> object:
    return await client.generate("hello")


@pytest.mark.parametrize("serve", [asks_about_the_model, generates])
async def test_a_leader_that_was_away_is_asked_as_soon_as_it_can_be_reached(
    server: ScriptedServer,
    standby: Standby,
    serve: Callable[[quire.AsyncClient], Coroutine[Any, Any, object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server is found again though it was marked as down for much longer."""
    monkeypatch.setattr(servers, "_DOWN_S", 3600.0)
    await server.stop()
    standby.gate.set_leader(server.address)
    async with quire.AsyncClient(f"{server.address},{standby.address}", connect_timeout_s=patient(30)) as client:
        answer = asyncio.create_task(serve(client))
        await asyncio.wait_for(standby.gate.was_asked.wait(), patient(10))
        await server.start(server.address)
        assert await answer


async def test_a_stream_goes_on_at_the_server_that_follows(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=6, released=3)
    follower = ScriptedServer()
    await follower.start()
    follower.runs = server.runs  # what was accepted is known to both
    async with quire.AsyncClient(f"{server.address},{follower.address}") as client:
        stream = client.stream("hello", request_id="lasting")
        chunks = [await anext(stream)]
        await server.stop()
        await follower.until(lambda: follower.count("attach", "lasting") == 1)
        follower.release("lasting")
        chunks += [chunk async for chunk in stream]
    await follower.stop()
    assert [chunk.position for chunk in chunks] == [0, 3]
    assert "".join(chunk.text for chunk in chunks) == "".join(f" {i}" for i in range(6))


@pytest.fixture
async def follower(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedServer]:
    """Another server, which leads with a later epoch and knows what was accepted; silence is noticed soon."""
    monkeypatch.setattr("quire.silence.ASK_AFTER_S", 0.1)
    monkeypatch.setattr("quire.session.ASK_AFTER_S", 0.1)
    monkeypatch.setattr("quire.session.LISTEN_S", 0.05)
    monkeypatch.setattr("quire.leader_search.SEARCH_EVERY_S", 0.1)
    follower = ScriptedServer()
    await follower.start()
    follower.runs, follower.epoch = server.runs, 2
    yield follower
    await follower.stop()


async def test_a_stream_leaves_a_leader_that_gets_nothing_done_for_one_with_a_later_epoch(
    server: ScriptedServer, follower: ScriptedServer
) -> None:
    """A leader that alone is cut off from the store does so: it answers, but no output of it becomes durable."""
    server.default = Script(num_tokens=6, released=3)
    async with quire.AsyncClient(f"{server.address},{follower.address}") as client:
        stream = client.stream("hello", request_id="lasting")
        assert (await anext(stream)).position == 0
        await asyncio.wait_for(follower.until(lambda: follower.count("attach", "lasting") == 1), patient(20))
        follower.release("lasting")
        assert [chunk.position async for chunk in stream] == [3]


async def test_what_a_leader_without_its_store_refuses_is_taken_by_the_one_that_follows(
    server: ScriptedServer, follower: ScriptedServer
) -> None:
    refusal = quire.UnavailableError("the journal's store does not answer", 0.2)
    server.default = Script(refusals=[refusal] * 100)
    server.refuse_calls = [refusal] * 100
    async with quire.AsyncClient(f"{server.address},{follower.address}", retries=20) as client:
        assert (await client.generate("hello")).text
    async with quire.AsyncClient(f"{server.address},{follower.address}", retries=20) as client:
        await client.tokenize("hello")


async def test_a_leader_that_a_standby_names_is_asked_too(
    server: ScriptedServer, follower: ScriptedServer, standby: Standby
) -> None:
    standby.gate.set_leader(follower.address)
    server.default = Script(num_tokens=6, released=3)
    async with quire.AsyncClient(f"{server.address},{standby.address}") as client:
        stream = client.stream("hello", request_id="lasting")
        await anext(stream)
        await asyncio.wait_for(follower.until(lambda: follower.count("attach", "lasting") == 1), patient(20))


@pytest.mark.parametrize("epoch", [1, 0])
async def test_a_leader_is_left_for_no_one_with_the_same_or_an_earlier_epoch(
    epoch: int, server: ScriptedServer, follower: ScriptedServer
) -> None:
    follower.epoch = epoch
    server.default = Script(num_tokens=6, released=3)
    async with quire.AsyncClient(f"{server.address},{follower.address}") as client:
        stream = client.stream("hello", request_id="lasting")
        await anext(stream)
        await asyncio.wait_for(follower.until(lambda: follower.num_looks >= 2), patient(20))
        server.release("lasting")
        assert [chunk.position async for chunk in stream] == [3]
        assert follower.count("attach", "lasting") == 0


async def test_while_nobody_leads_submissions_wait_and_are_no_refusals(
    server: ScriptedServer, standby: Standby
) -> None:
    async with quire.AsyncClient(standby.address, retries=0, connect_timeout_s=20.0) as client:
        stream = client.stream("hello")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.accepted(), 0.3)
        standby.gate.set_leader(server.address)
        assert (await stream.completion()).text


async def test_servers_of_which_none_ever_leads_are_given_up(standby: Standby) -> None:
    async with quire.AsyncClient(standby.address, connect_timeout_s=0.2) as client:
        with pytest.raises(quire.UnavailableError, match=r"no Quire server at .* leads"):
            await client.generate("hello")
        with pytest.raises(quire.UnavailableError, match=r"no Quire server at .* leads"):
            await client.model()


async def test_no_connection_is_opened_once_they_are_closed() -> None:
    """Regression: a call that a standby had refused went on after its client was closed, over a connection to stay."""
    closed = servers.Servers(f"{free_address()},{free_address()}", Credentials())
    await closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        await closed.find_reachable()
    with pytest.raises(RuntimeError, match="closed"):
        closed.current_channel  # noqa: B018 - opens it


class ChangedCertificates(Credentials):
    """Credentials whose files have always changed since a channel was opened."""

    @property
    def certificates(self) -> object | None:
        """Token that equals no other."""
        return object()


async def test_a_channel_that_another_call_gives_up_meanwhile_counts_as_one_to_no_server() -> None:
    """Regression: gRPC raised UsageError, which failed every request of the client, or ended its view of the shards."""
    with ExitStack() as stack:
        mute = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]  # they take no call
        asked = servers.Servers(",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in mute), ChangedCertificates())
        finding = []
        for _ in range(6):  # each gives up, in the end, what the next ones wait for
            finding.append(asyncio.create_task(asked.find_reachable()))
            await asyncio.sleep(0.1)
        await asyncio.gather(*finding)
        await asked.close()


async def test_two_servers_that_each_name_the_other_are_not_asked_without_pause(standby: Standby) -> None:
    other = Standby()
    await other.start()
    standby.gate.set_leader(other.address)
    other.gate.set_leader(standby.address)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with quire.AsyncClient(standby.address, connect_timeout_s=patient(1.0)) as client:
        with pytest.raises(quire.UnavailableError):
            await client.generate("hello")
    num_calls = standby.gate.num_calls + other.gate.num_calls
    assert 1 < num_calls <= 4 + (loop.time() - began_s) / 0.025  # each after 0.025 s or more
    await other.stop()


@pytest.mark.parametrize("address", ["127.0.0.1:1,", "127.0.0.1:1, host:2", "[::1]:7,h:8"])
async def test_several_addresses_may_be_given(address: str) -> None:
    async with quire.AsyncClient(address) as client:
        assert client.address == address


@pytest.mark.parametrize("address", ["127.0.0.1:1,nonsense", ",", "127.0.0.1:1;127.0.0.1:2"])
def test_each_of_several_must_be_an_address(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        quire.AsyncClient(address)
