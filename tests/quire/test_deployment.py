"""Clients that do not know yet which shards there are: their requests wait a moment, and can be given up meanwhile."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import pytest

import quire
from quire import deployment
from quire.rpc import SHARD_KEY
from quire.shards import new_request_id, session_number, shard_of_id
from quire.v1 import cluster_pb2
from quire.v1 import inference_pb2 as pb
from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer

Server = TypeVar("Server", bound=ScriptedServer)


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


async def test_an_empty_session_key_names_no_session(silent: ScriptedServer) -> None:
    async with quire.AsyncClient(silent.address) as client:
        assert "-" not in client.new_request_id(session_key="")
        stream = client.stream("hello", session_key="")
        assert "-" not in stream.request_id
        silent.may_tell_shards.set()
        await stream.completion()


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


class TwoShards(ScriptedServer):
    """Leader of two shards, whose requests are all in shard 0."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []  # shards, for records
        self.sessions: Counter[int] = Counter()

    async def Topology(
        self, request: cluster_pb2.TopologyRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.TopologyResponse]:
        shards = [cluster_pb2.Shard(number=number, leader=self.address, num_workers=1) for number in range(2)]
        yield cluster_pb2.TopologyResponse(shards=shards)

    async def GetRequest(self, request: pb.GetRequestRequest, context: Any) -> pb.GetRequestResponse:
        self.asked.append(shard_of_call(context))
        if self.asked[-1]:
            raise quire.NotFoundError(f"no request has the id {request.request_id!r}")
        return await super().GetRequest(request, context)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        self.sessions[shard_of_call(context)] += 1
        async for message in super().Session(request_iterator, context):
            yield message


def shard_of_call(context: Any) -> int:
    return int(dict(context.invocation_metadata())[SHARD_KEY])


@asynccontextmanager
async def started(server: Server) -> AsyncIterator[Server]:
    await server.start()
    server.default = Script(num_tokens=2)
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
async def two_shards() -> AsyncIterator[TwoShards]:
    async with started(TwoShards()) as server:
        yield server


@pytest.mark.parametrize("prefix", ["resp_", "msg_"])
async def test_an_id_whose_shard_was_once_another_is_looked_for_in_all(two_shards: TwoShards, prefix: str) -> None:
    """Before a shard was read behind `_`, its request went where the whole id belongs."""
    made = new_request_id(1, prefix)
    two_shards.submit(pb.GenerateRequest(request_id=made, text="hello"))
    async with quire.AsyncClient(two_shards.address) as client:
        assert (await client.get(made)).request_id == made
        assert two_shards.asked == [1, 0]
        assert (await client.attach(made).completion()).request_id == made
        assert two_shards.sessions == {0: 1}
        with pytest.raises(quire.NotFoundError):
            await client.get(new_request_id(1, prefix))


@pytest.mark.parametrize("prefix", ["", "chatcmpl-"])
async def test_an_id_that_has_always_named_its_shard_is_looked_for_there_alone(
    two_shards: TwoShards, prefix: str
) -> None:
    made = new_request_id(1, prefix)
    two_shards.submit(pb.GenerateRequest(request_id=made, text="hello"))
    async with quire.AsyncClient(two_shards.address) as client:
        with pytest.raises(quire.NotFoundError):
            await client.get(made)
        assert two_shards.asked == [1]


class LateTopology(TwoShards):
    """Two shards, of which whoever asks first is told something else, or nothing."""

    def __init__(self, first: cluster_pb2.TopologyResponse | None) -> None:
        super().__init__()
        self.first = first
        self.num_told = 0

    async def Topology(
        self, request: cluster_pb2.TopologyRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.TopologyResponse]:
        self.num_told += 1
        if self.num_told > 1:
            async for message in super().Topology(request, context):
                yield message
        elif self.first is None:
            await asyncio.Event().wait()
        else:
            yield self.first


@pytest.mark.parametrize(
    ("numbers", "fields"),
    [
        ([], {}),
        ([0], {"num_shards": 2**31}),
        ([1], {}),
        ([1, 0], {}),
        ([0, 1], {"version": 1, "num_shards": 2, "former_num_shards": [0]}),
        ([0, 1], {"version": 1, "num_shards": 2, "former_num_shards": [2**31]}),
    ],
    ids=["none", "more than there are", "not from 0", "order", "none before", "too many before"],
)
async def test_shards_that_cannot_be_are_asked_for_again(numbers: list[int], fields: dict[str, Any]) -> None:
    """A flipped bit makes such a message, which no checksum finds."""
    shards = [cluster_pb2.Shard(number=number) for number in numbers]
    first = cluster_pb2.TopologyResponse(shards=shards, **fields)
    async with started(LateTopology(first)) as server, quire.AsyncClient(server.address) as client:
        assert (await client.generate("hello", request_id="mine")).usage.completion_tokens == 2
        assert server.num_told == 2
        with pytest.raises(quire.NotFoundError):
            await client.get(new_request_id(1))
        assert 1 in server.asked


@pytest.mark.parametrize("what", ["shards", "stats"])
async def test_calls_that_speak_of_all_shards_ask_a_slow_server_again(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_ASK_S", 0.2)
    async with started(LateTopology(None)) as server, quire.AsyncClient(server.address) as client:
        found = await client.shards() if what == "shards" else (await client.stats()).workers
        assert len(found) == 2


async def test_a_request_is_looked_for_in_its_shard_where_a_server_is_slow_to_say_which_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployment, "_ASK_S", 0.2)
    async with started(LateTopology(None)) as server, quire.AsyncClient(server.address) as client:
        with pytest.raises(quire.NotFoundError):
            await client.get(new_request_id(1))
        assert server.asked == [1]


async def test_a_request_is_read_from_its_shard_where_a_server_is_slow_to_say_which_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployment, "_ASK_S", 0.2)
    async with started(LateTopology(None)) as server, quire.AsyncClient(server.address) as client:
        made = new_request_id(1)
        server.submit(pb.GenerateRequest(request_id=made, text="hello"))
        assert (await client.attach(made).completion()).request_id == made
        assert server.sessions == {1: 1}


async def test_an_id_of_the_callers_is_submitted_to_its_shard_where_a_server_is_slow_to_say_which_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shard 0 would take it, and its own shard would take the retry of a client that knows the shards."""
    monkeypatch.setattr(deployment, "_ASK_S", 0.2)
    mine = next(each for each in map(str, range(100)) if shard_of_id(each, 2) == 1)
    async with started(LateTopology(None)) as server, quire.AsyncClient(server.address) as client:
        await client.generate("hello", request_id=mine)
        assert server.sessions == {1: 1}


@pytest.mark.parametrize("options", [{}, {"timeout_s": 0.3}])
async def test_an_id_of_the_callers_is_not_submitted_while_nobody_says_which_shards_there_are(
    silent: ScriptedServer, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_ASK_S", 0.1)
    monkeypatch.setattr(deployment, "_AGAIN_S", 0.01)
    kind = quire.RequestExpiredError if options else quire.UnavailableError
    async with quire.AsyncClient(silent.address, reconnect_timeout_s=1.0) as client:
        with pytest.raises(kind, match="which shards there are"):
            await client.generate("hello", request_id="mine", **options)
        assert silent.count("submit", "mine") == 0
        monkeypatch.setattr(deployment, "_ASK_S", patient(20))
        silent.may_tell_shards.set()
        await client.generate("hello", request_id="mine")


async def test_an_id_of_the_callers_waits_for_a_server_that_was_never_there_no_longer_than_any() -> None:
    """Regression: attaching waited as long as for a server that was there before."""
    async with quire.AsyncClient("127.0.0.1:1", connect_timeout_s=0.1, reconnect_timeout_s=1e6) as client:
        for call in (client.generate("hello", request_id="mine"), client.attach("mine").completion()):
            with pytest.raises(quire.UnavailableError, match=r"no Quire server answers at 127\.0\.0\.1:1"):
                await asyncio.wait_for(call, patient(10))


async def test_who_attaches_waits_for_a_server_that_was_there_before(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=2)
    async with quire.AsyncClient(server.address, connect_timeout_s=0.1, reconnect_timeout_s=1e6) as client:
        await client.generate("hello", request_id="mine")
        await server.stop()
        attaching = asyncio.create_task(client.attach("mine").completion())
        await asyncio.sleep(0.5)  # longer than one that was never there is waited for
        await server.start(server.address)
        assert (await asyncio.wait_for(attaching, patient(20))).usage.completion_tokens == 2


class ChangingLoads(TwoShards):
    """Two shards, and a stream that tells how many requests run in each until it is ended."""

    def __init__(self) -> None:
        super().__init__()
        self.num_running = 0
        self.num_streams = 0
        self.have_changed = asyncio.Event()
        self.has_ended = asyncio.Event()
        self.may_begin = asyncio.Event()
        self.may_begin.set()
        self.refusal: Any = None  # code
        self.num_damaged = 0  # messages to come that no server would say

    def change_loads(self) -> None:
        self.num_running += 1
        self.have_changed.set()
        self.have_changed = asyncio.Event()

    async def Topology(
        self, request: cluster_pb2.TopologyRequest, context: Any
    ) -> AsyncIterator[cluster_pb2.TopologyResponse]:
        self.num_streams += 1
        if self.refusal is not None:
            await context.abort(self.refusal, "not now")
        await self.may_begin.wait()
        while not self.has_ended.is_set():
            have_changed = self.have_changed
            if self.num_damaged:
                self.num_damaged -= 1
                yield cluster_pb2.TopologyResponse(num_shards=7)
            yield cluster_pb2.TopologyResponse(
                shards=[
                    cluster_pb2.Shard(number=number, leader=self.address, num_workers=1, num_running=self.num_running)
                    for number in range(2)
                ]
            )
            await have_changed.wait()

    async def GetRequest(self, request: pb.GetRequestRequest, context: Any) -> pb.GetRequestResponse:
        await context.abort(grpc.StatusCode.INTERNAL, "no words of ours")
        raise AssertionError("unreachable")

    async def end_stream(self) -> None:
        """End the stream, and wait until another one is asked for."""
        num_before = self.num_streams
        self.has_ended.set()
        self.change_loads()
        await until(lambda: self.num_streams > num_before)
        self.has_ended.clear()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(patient(20)):
        while not is_so():  # noqa: ASYNC110 - of another's state
            await asyncio.sleep(0.01)


async def until_told(client: quire.AsyncClient, server: ChangingLoads) -> None:
    server.change_loads()
    async with asyncio.timeout(patient(20)):
        while [shard.num_running for shard in await client.shards()] != [server.num_running] * 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_shards_are_followed_on_after_their_connection_was_given_up() -> None:
    """Regression: gRPC cancels a stream that was just begun, and the client went for ever by what it had heard."""
    async with started(ChangingLoads()) as server, quire.AsyncClient(server.address, connect_timeout_s=0.2) as client:
        await until_told(client, server)
        for _ in range(2):
            server.may_begin.clear()
            await server.end_stream()
            with pytest.raises(quire.QuireError, match="no words of ours"):
                await client.get(new_request_id(0))  # over the connection that is to tell of the shards
            server.may_begin.set()
            await until_told(client, server)


async def test_shards_are_followed_on_after_a_message_that_cannot_be_read() -> None:
    async with started(ChangingLoads()) as server, quire.AsyncClient(server.address) as client:
        await until_told(client, server)
        server.num_unreadable["Topology"] = 2
        await server.end_stream()
        assert not server.num_unreadable["Topology"]
        await until_told(client, server)


async def test_shards_are_followed_on_where_the_stream_behind_a_damaged_message_never_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployment, "_FIRST_MESSAGE_S", 0.2)
    async with started(ChangingLoads()) as server, quire.AsyncClient(server.address) as client:
        await until_told(client, server)
        num_streams = server.num_streams
        server.may_begin.clear()
        server.num_damaged = 1
        server.change_loads()
        await until(lambda: server.num_streams == num_streams + 2)  # it is given up, and asked for again
        server.may_begin.set()
        await until_told(client, server)


async def test_shards_are_followed_at_the_later_leader_once_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that alone is cut off from the store goes on saying what it knows of them."""
    monkeypatch.setattr("quire.silence.ASK_AFTER_S", 0.1)
    monkeypatch.setattr("quire.session.ASK_AFTER_S", 0.1)
    monkeypatch.setattr("quire.session.LISTEN_S", 0.05)
    monkeypatch.setattr("quire.leader_search.SEARCH_EVERY_S", 0.1)
    async with started(ChangingLoads()) as leader, started(ChangingLoads()) as later:
        later.runs, later.epoch, later.num_running = leader.runs, 2, 100
        leader.default = Script(num_tokens=6, released=3)
        async with quire.AsyncClient(f"{leader.address},{later.address}") as client:
            await until_told(client, leader)
            stream = client.stream("hello", request_id=new_request_id(0))
            await anext(stream)
            await later.until(lambda: later.count("attach", stream.request_id) == 1)
            await until_told(client, later)
            later.release(stream.request_id)
            assert [chunk.position async for chunk in stream] == [3]


async def test_shards_are_followed_on_after_a_stream_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first message may get lost on the way; the connection lives."""
    monkeypatch.setattr(deployment, "_FIRST_MESSAGE_S", 0.2)
    async with started(ChangingLoads()) as server, quire.AsyncClient(server.address) as client:
        await until_told(client, server)
        server.may_begin.clear()
        await server.end_stream()
        await until(lambda: server.num_streams > 3)
        server.may_begin.set()
        await until_told(client, server)


class Unknown:
    """Code of a status that gRPC does not know, as a flipped bit makes one."""

    value = (34, "of a flipped bit")


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE, Unknown])
@pytest.mark.parametrize("is_first", [False, True])
async def test_shards_are_asked_for_again_after_any_refusal(
    is_first: bool, code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: where the first answer was UNIMPLEMENTED, of a proxy or an older server, they were never known."""
    monkeypatch.setattr(deployment, "_ASSUMED_AGAIN_S", 0.2)
    async with started(ChangingLoads()) as server, quire.AsyncClient(server.address) as client:
        if not is_first:
            await until_told(client, server)
        server.refusal = code
        if not is_first:
            await server.end_stream()
        await client.shards()
        server.refusal = None
        await until_told(client, server)


async def test_a_call_is_made_again_if_its_answer_cannot_be_read(server: ScriptedServer) -> None:
    async with quire.AsyncClient(server.address) as client:
        server.num_unreadable["GetModel"] = 2
        assert (await client.model()).name == "scripted"
        server.num_unreadable["Check"] = 1
        with pytest.raises(quire.UnavailableError, match="damaged on its way"):
            await client.health()
        assert await client.health() is quire.Health.SERVING
        server.num_unreadable["GetModel"] = 1_000
        with pytest.raises(quire.UnavailableError, match="damaged on its way"):
            await client.model()
