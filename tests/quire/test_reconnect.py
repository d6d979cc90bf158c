"""Survival of a request: broken sessions, a restarted server, a slow reader."""

import asyncio
import gc

import pytest

import quire
from quire import session
from quire.v1 import inference_pb2 as pb
from tests.chaos.proxy import Proxy
from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer
from tests.scheduler.journal_setup import until


def text_of(num_tokens: int) -> str:
    return "".join(f" {i}" for i in range(num_tokens))


async def test_a_broken_session_is_resumed_where_it_was(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.default = Script(num_tokens=6, released=2)
    streams = [client.stream("hello", request_id=f"r{i}") for i in range(3)]
    chunks = [[await anext(stream)] for stream in streams]
    server.break_sessions()
    await server.until(lambda: all(server.count("attach", f"r{i}") == 1 for i in range(3)))
    for i in range(3):
        server.release(f"r{i}")
    for stream, mine in zip(streams, chunks, strict=True):
        mine += [chunk async for chunk in stream]

    for mine in chunks:
        assert "".join(chunk.text for chunk in mine) == text_of(6)
        assert [chunk.position for chunk in mine] == [0, 2]  # attached at 2: nothing came twice
    assert server.num_sessions == 2


async def test_a_restarted_server_is_found_again(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.default = Script(num_tokens=6, released=3)
    stream = client.stream("hello", request_id="lasting")
    first = await anext(stream)
    address = server.address
    await server.stop()
    server.runs["lasting"].release(6)
    await server.start(address)
    rest = [chunk async for chunk in stream]

    assert first.text + "".join(chunk.text for chunk in rest) == text_of(6)


async def test_a_call_whose_server_ends_meanwhile_is_made_again(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.may_answer.clear()
    call = asyncio.create_task(client.stats())
    await server.until(lambda: server.num_looks == 1)
    await server.stop()
    server.may_answer.set()
    await server.start(server.address)
    assert (await call).workers[0].worker_id == "w0"
    assert server.num_looks == 2


async def test_a_call_whose_server_ends_for_good_says_that_none_answers(server: ScriptedServer) -> None:
    server.may_answer.clear()
    async with quire.AsyncClient(server.address, connect_timeout_s=0.3) as client:
        call = asyncio.create_task(client.stats())
        await server.until(lambda: server.num_looks == 1)
        await server.stop()
        with pytest.raises(quire.UnavailableError, match="no Quire server answers"):
            await call


async def test_a_submission_without_an_answer_is_made_again_and_runs_once(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    silent = Script(num_tokens=4, silent=True)
    server.default = silent
    stream = client.stream("hello", request_id="unheard")
    await server.until(lambda: server.count("submit", "unheard") == 1)
    silent.silent = False
    server.break_sessions()

    assert (await stream.completion()).text == text_of(4)
    assert server.count("submit", "unheard") == 2
    assert (await stream.accepted()).attached


async def test_many_submissions_without_an_answer_wear_out_the_patience_with_a_connection_once(
    server: ScriptedServer, client: quire.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has much to answer would else be left as often as there are requests."""
    monkeypatch.setattr("quire.silence.ANSWER_S", 0.2)
    monkeypatch.setattr("quire.session.LISTEN_S", 0.02)
    server.default = Script(silent=True)
    began_s = asyncio.get_running_loop().time()
    streams = [client.stream(f"request {number}") for number in range(6)]
    await server.until(lambda: server.num_sessions == 4)
    assert asyncio.get_running_loop().time() - began_s >= 0.2 + 0.4 + 0.8
    for stream in streams:
        await stream.aclose()


async def test_a_request_that_waits_for_long_is_attached_to_again_on_the_stream_that_there_is(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    """A long queue is no reason to leave a connection that answers."""
    server.default = Script(num_tokens=4, released=2)
    stream = client.stream("hello", request_id="queued")
    await anext(stream)
    await server.until(lambda: server.count("attach", "queued") == 1)
    assert server.num_sessions == 1
    server.release("queued")
    assert (await stream.completion()).text == text_of(4)


async def test_a_stream_that_is_left_for_two_reasons_at_a_time_is_left_once(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    """Regression: the second reason, such as a later leader that was found, ended in an exception that nobody heard."""
    server.default = Script(num_tokens=4, released=1)
    stream = client.stream("hello", request_id="left")
    await anext(stream)
    assert client._deployment is not None
    session = client._deployment.first.session
    session._go_to_later_leader()
    await asyncio.sleep(0)  # its task has been told, and has not had its turn
    session._go_to_later_leader()
    await server.until(lambda: server.count("attach", "left") == 1)
    server.release("left")
    assert (await stream.completion()).text == text_of(4)


async def test_a_resumption_refused_for_now_is_tried_again(server: ScriptedServer, client: quire.AsyncClient) -> None:
    script = server.default = Script(num_tokens=4, released=2)
    stream = client.stream("hello", request_id="patient")
    await anext(stream)
    script.refusals = [quire.UnavailableError("recovering", 0.01) for _ in range(8)]  # more than `retries`
    server.break_sessions()
    await server.until(lambda: server.count("attach", "patient") == 9)
    server.release("patient")
    assert (await stream.completion()).text == text_of(4)


async def test_a_request_whose_resumption_is_refused_for_now_can_be_cancelled(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    """The server has it: to forget it here would leave it running there."""
    script = server.default = Script(num_tokens=4, released=2)
    stream = client.stream("hello", request_id="unwanted", on_disconnect=quire.OnDisconnect.CONTINUE)
    await anext(stream)
    script.refusals = [quire.UnavailableError("recovering", 0.5), quire.UnavailableError("recovering", 0.01)]
    server.break_sessions()
    await server.until(lambda: server.count("attach", "unwanted") == 1)
    await stream.aclose()
    await server.until(lambda: server.runs["unwanted"].state == pb.REQUEST_STATE_CANCELLED)
    assert server.count("attach", "unwanted") == 3


async def test_a_server_that_stays_away_is_given_up(server: ScriptedServer) -> None:
    server.default = Script(num_tokens=4, released=2)
    async with quire.AsyncClient(server.address, reconnect_timeout_s=0.2) as client:
        stream = client.stream("hello")
        await anext(stream)
        await server.stop()
        with pytest.raises(quire.UnavailableError, match=r"quire serve"):
            await anext(stream)


@pytest.mark.parametrize("was_reached", [False, True])
async def test_a_server_that_takes_requests_and_never_answers_is_given_up(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, *, was_reached: bool
) -> None:
    """A proxy that waits for the end of a stream before it passes any of it on looks so."""
    async with quire.AsyncClient(server.address, connect_timeout_s=0.15, reconnect_timeout_s=0.3) as client:
        if was_reached:
            await client.generate("hello")
            server.break_sessions()
        monkeypatch.setattr("quire.silence.ANSWER_S", 0.1)
        monkeypatch.setattr("quire.session.LISTEN_S", 0.01)
        monkeypatch.setattr("quire.session.SETTLED_S", 0.05)
        server.default = Script(silent=True)
        with pytest.raises(quire.UnavailableError, match="does not answer: it takes requests and is silent"):
            await asyncio.wait_for(client.generate("hello"), patient(10))


async def test_a_server_that_was_never_there_is_given_up_soon() -> None:
    async with quire.AsyncClient("127.0.0.1:1", connect_timeout_s=0.1) as client:
        with pytest.raises(quire.UnavailableError, match=r"127\.0\.0\.1:1 .*quire serve"):
            await client.generate("hello")
        with pytest.raises(quire.UnavailableError, match=r"127\.0\.0\.1:1"):
            await client.stats()
        with pytest.raises(quire.UnavailableError, match="not ready after"):
            await client.wait_ready(0.05)


async def test_a_deadline_that_passes_while_no_server_is_there_says_so() -> None:
    told = r"deadline passed; no Quire server answers at 127\.0\.0\.1:1"
    async with quire.AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(quire.RequestExpiredError, match=told):
            await client.generate("hello", timeout_s=0.05)


@pytest.mark.parametrize("address", ["", "localhost", "localhost:port", "127.0.0.1:99999", "http://host:80", ":80"])
def test_what_cannot_be_an_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        quire.AsyncClient(address)


async def test_a_request_that_a_new_server_does_not_know_has_failed(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = Script(num_tokens=4, released=2)
    stream = client.stream("hello", request_id="forgotten")
    await anext(stream)
    del server.runs["forgotten"]
    server.break_sessions()
    with pytest.raises(quire.RequestLostError, match=r"forgotten, after 2 tokens of output: .* submit it again"):
        await anext(stream)


async def test_nothing_is_left_of_broken_sessions(server: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    server.default = Script(num_tokens=6, released=2)

    def use(told: "asyncio.Future[None]") -> str:
        with quire.Client(server.address) as client, client.stream("hello", request_id="r") as stream:
            next(stream)
            told.get_loop().call_soon_threadsafe(told.set_result, None)
            return stream.completion().text

    begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    using = asyncio.create_task(asyncio.to_thread(use, begun))
    await begun
    for number in (1, 2):
        server.break_sessions()
        await server.until(lambda: server.count("attach", "r") == number)  # noqa: B023 - awaited at once
    gc.collect()  # asyncio logs a pending task when it is collected
    server.release("r")
    assert await using == text_of(6)
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


async def test_a_cancellation_survives_a_broken_session(server: ScriptedServer, client: quire.AsyncClient) -> None:
    server.default = Script(num_tokens=9, released=1)
    stream = client.stream("hello", request_id="unwanted")
    await anext(stream)
    server.break_sessions()
    await server.until(lambda: server.count("end-of-session", "") == 1)
    await stream.aclose()
    await server.until(lambda: server.count("cancel", "unwanted") >= 1)


async def test_an_idle_client_connects_again_for_its_next_request(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    await client.generate("hello")
    address = server.address
    await server.stop()
    await server.start(address)
    assert (await client.generate("hello again")).text == text_of(8)


@pytest.mark.parametrize("on_disconnect", quire.OnDisconnect)
async def test_a_slow_reader_holds_up_nobody_and_loses_nothing(
    server: ScriptedServer, on_disconnect: quire.OnDisconnect
) -> None:
    server.scripts["slow"] = Script(num_tokens=500, tokens_per_chunk=1)
    async with quire.AsyncClient(server.address, buffer_tokens=16) as client:
        slow = client.stream("slow", request_id="slow", on_disconnect=on_disconnect)
        await slow.accepted()
        others = await asyncio.gather(*(client.generate(f"fast {i}") for i in range(20)))
        assert {each.text for each in others} == {text_of(8)}
        chunks = [chunk async for chunk in slow]  # only now is it read

    assert "".join(chunk.text for chunk in chunks) == text_of(500)
    assert [chunk.position for chunk in chunks] == list(range(500))
    assert server.count("attach", "slow") >= 1
    if on_disconnect is quire.OnDisconnect.CONTINUE:
        assert server.count("detach", "slow") >= 1


@pytest.mark.parametrize("on_disconnect", quire.OnDisconnect)
async def test_a_slow_reader_gets_all_of_what_ended_in_time(
    server: ScriptedServer, on_disconnect: quire.OnDisconnect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "DEADLINE_SLACK_S", patient(0.5))
    server.scripts["slow"] = Script(num_tokens=500, tokens_per_chunk=1)
    async with quire.AsyncClient(server.address, buffer_tokens=16) as client:
        slow = client.stream("slow", request_id="slow", on_disconnect=on_disconnect, timeout_s=patient(1.0))
        await slow.accepted()
        await asyncio.sleep(patient(1.5) + 0.2)  # now its time is over
        assert (await slow.completion()).text == text_of(500)


async def test_a_reader_that_catches_up_while_its_resumption_is_refused_for_now_is_attached_once(
    server: ScriptedServer,
) -> None:
    """Regression: it was attached twice, and of the first time a handle was left for as long as the stream was open."""
    script = server.default = Script(num_tokens=40, released=30, tokens_per_chunk=1)
    async with quire.AsyncClient(server.address, buffer_tokens=16) as client:
        stream = client.stream("hello", request_id="slow")
        await until(lambda: stream._request.is_behind)
        script.refusals = [quire.UnavailableError("recovering", 0.3)]
        server.break_sessions()
        await server.until(lambda: server.count("attach", "slow") == 1)
        assert client._deployment is not None
        session = client._deployment.first.session
        await until(lambda: not session._by_handle)
        (entry,) = session._entries.values()
        chunks = [await anext(stream) for _ in range(17)]  # more than were buffered
        await until(lambda: not entry.retries_later)
        server.release("slow")
        chunks += [chunk async for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == text_of(40)
        assert not session._by_handle


@pytest.mark.parametrize("on_disconnect", quire.OnDisconnect)
async def test_nothing_is_left_of_a_request_whose_reader_was_behind_and_left(
    server: ScriptedServer, on_disconnect: quire.OnDisconnect
) -> None:
    """Regression: output that came before the word of the cancellation had the request left at once, unheard."""
    server.default = Script(num_tokens=500, released=100, tokens_per_chunk=1)
    async with quire.AsyncClient(server.address, buffer_tokens=16) as client:
        stream = client.stream("hello", request_id="left", on_disconnect=on_disconnect)
        await until(lambda: stream._request.is_behind)
        await stream.aclose()
        await server.until(lambda: server.runs["left"].state == pb.REQUEST_STATE_CANCELLED)
        assert client._deployment is not None
        entries = client._deployment.first.session._entries
        await until(lambda: not entries)


async def test_an_unread_request_keeps_at_most_its_buffer(server: ScriptedServer) -> None:
    server.scripts["slow"] = Script(num_tokens=500, tokens_per_chunk=1)
    async with quire.AsyncClient(server.address, buffer_tokens=16) as client:
        slow = client.stream("slow", request_id="slow", on_disconnect=quire.OnDisconnect.CONTINUE)
        await server.until(lambda: server.count("detach", "slow") == 1)
        buffered = [await anext(slow) for _ in range(16)]
        await server.until(lambda: server.count("attach", "slow") == 1)
        assert [chunk.position for chunk in buffered] == list(range(16))
        assert (await slow.completion()).text == text_of(500)


async def test_a_request_nobody_reads_yet_keeps_its_reader_on_the_server(server: ScriptedServer) -> None:
    server.scripts["slow"] = Script(num_tokens=500, released=400, tokens_per_chunk=1)
    async with quire.AsyncClient(server.address, buffer_tokens=16) as client:
        slow = client.stream("slow", request_id="slow")
        await slow.accepted()
        await client.generate("other")  # by now more than the buffer has come
        assert server.count("detach", "slow") == 0  # the server would cancel what has no reader
        server.release("slow")
        assert (await slow.completion()).text == text_of(500)


async def test_what_comes_out_of_order_is_fetched_again_and_disturbs_nobody(
    server: ScriptedServer, client: quire.AsyncClient
) -> None:
    server.default = Script(num_tokens=9, released=4)
    bad = client.stream("bad", request_id="bad")
    good = client.stream("good", request_id="good")
    await anext(bad)
    await anext(good)
    server.skip("bad", 2)
    server.release("bad")
    server.release("good")
    assert (await bad.completion()).text == text_of(9)
    assert (await good.completion()).text == text_of(9)


async def test_a_server_whose_first_frame_takes_long_is_reached(server: ScriptedServer) -> None:
    """Server far away, behind TLS, or busy: one attempt to connect does not end before its answer can be here."""
    async with Proxy(server.address) as proxy:
        proxy.hold("down")
        async with quire.AsyncClient(proxy.address) as client:
            call = asyncio.create_task(client.stats())
            await until(lambda: proxy.num_connections == 1)
            await asyncio.sleep(0.7)
            proxy.heal()
            assert (await call).workers[0].worker_id == "w0"
        assert proxy.num_connections == 1
