"""HTTP below the routes: old and new versions, unfinished requests, heads without end, and too many connections."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import orjson
import pytest
from starlette.types import Receive, Scope, Send
from structlog.testing import capture_logs
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import quire
from gateway_svc import http_connection
from gateway_svc.app import create_app, for_web_pages
from gateway_svc.error_answer import answer_busy
from gateway_svc.http_connection import MAX_HEAD_BYTES, MAX_QUEUED, MOST_BEYOND
from gateway_svc.key_check import OPEN_PATHS
from tests.gateway.raw_http import BODY, HEAD, OFFER, application, read_answer, said, served, talk, told
from tests.patience import patient


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0"])
@pytest.mark.parametrize("cut", [None, 30, len(HEAD) + 40, -3])
def test_a_request_that_offers_another_protocol_keeps_its_body(protocol: bytes, cut: int | None) -> None:
    """Java's client offers HTTP/2 with its first request."""
    offer = (
        b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: %b\r\nHTTP2-Settings: AAMAAABkAAQA\r\n\r\n" % protocol
    )
    sent = HEAD + offer + BODY
    pieces = [sent] if cut is None else [sent[:cut], sent[cut:]]
    found = said(asyncio.run(told(*pieces)))
    assert (found["method"], found["body"], found["upgrade"]) == ("POST", BODY.decode(), None)
    assert "http2-settings" in found["names"]


def test_several_offers_behind_each_other_are_answered_in_turn() -> None:
    offering = HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + BODY
    answer = asyncio.run(told(offering * 3 + HEAD + b"Connection: close\r\n\r\n" + BODY))
    assert answer.count(b"HTTP/1.1 200") == answer.count(b'"method":"POST"') == 4


def test_an_offer_by_http_1_0_is_answered_as_http_1_0() -> None:
    answer = asyncio.run(told(b"GET /stream HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"))
    assert answer.endswith(b"\r\n\r\none two three")
    assert b"transfer-encoding" not in answer


def test_as_many_requests_as_may_be_queued_are_answered() -> None:
    last = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = asyncio.run(told(OFFER * MAX_QUEUED + last))
    assert answer.count(b"HTTP/1.1 200") == MAX_QUEUED + 1


@pytest.mark.parametrize("sent", [OFFER, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_connection_with_too_many_requests_in_its_queue_is_closed(sent: bytes) -> None:
    assert asyncio.run(told(sent * (MAX_QUEUED + 2))).count(b"HTTP/1.1") <= 1


def test_a_body_whose_length_is_not_declared_is_refused() -> None:
    sent = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\r\n" + BODY
    assert asyncio.run(told(sent)).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.parametrize("target", [b"example.com:443", b"/"])
def test_a_tunnel_is_refused(target: bytes) -> None:
    answer = asyncio.run(told(b"CONNECT %b HTTP/1.1\r\nHost: example.com\r\n\r\n" % target))
    assert answer.startswith(b"HTTP/1.1 400")


def test_http_1_0_gets_a_stream_without_chunks_that_ends_with_the_connection() -> None:
    answer = asyncio.run(told(b"GET /stream HTTP/1.0\r\n\r\n"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == b"one two three"
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    whole = asyncio.run(told(b"GET / HTTP/1.0\r\n\r\n"))
    assert said(whole)["method"] == "GET"
    assert b"content-length" in whole


def test_uvicorn_starts_first_and_queued_requests_where_connections_fit_in() -> None:
    """The place has no public name: a uvicorn without it would answer with chunks, or with words of its own."""
    assert "_start_asgi_task" in vars(HttpToolsProtocol)
    answer = asyncio.run(told(HEAD + b"\r\n" + BODY + b"GET /stream HTTP/1.0\r\n\r\n"))
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.endswith(b"\r\n\r\none two three")


def test_an_answer_in_place_of_the_order_to_send_the_body_is_the_last_of_its_connection() -> None:
    head = b" HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    refused = asyncio.run(told(b"POST /early" + head))
    assert refused.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in refused
    assert refused.count(b"HTTP/1.1") == 1
    ordered = asyncio.run(told(b"POST /" + head, BODY + b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    assert ordered.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
    assert ordered.count(b"HTTP/1.1 200") == 2
    assert b'"method":"GET"' in ordered


@pytest.mark.parametrize("head", [b"HTTP/1.0\r\n", b"HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"])
def test_an_answer_before_the_body_has_come_is_not_lost_where_the_connection_ends_with_it(head: bytes) -> None:
    """Requests of nginx come so unless it is told otherwise; it makes a 502 of a connection that is cut."""
    num_bytes = 64 << 20  # more than the buffers of a connection hold

    async def send() -> bytes:
        async with served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(patient(30)):
                writer.write(b"POST /early %bContent-Length: %d\r\n\r\n" % (head, num_bytes))
                for _ in range(num_bytes >> 20):
                    writer.write(bytes(1 << 20))
                    await writer.drain()
                answer = await reader.read()
            writer.close()
            return answer

    answer = asyncio.run(send())
    assert answer.startswith(b"HTTP/1.1 413")
    assert answer.endswith(b"\r\n\r\nno")
    assert b"connection: close" in answer


async def test_a_connection_that_ended_with_its_answer_takes_no_further_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_connection, "LINGER_S", 0.05)
    methods = []

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        methods.append(scope["method"])
        await application(scope, receive, send)

    async with served(counted) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /early HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        async with asyncio.timeout(patient(30)):
            assert (await reader.read()).startswith(b"HTTP/1.1 413")
            writer.write(BODY + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with suppress(ConnectionError):
                while True:  # until its time is over
                    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                    await writer.drain()
                    await asyncio.sleep(0)
        writer.close()
    assert (methods, caplog.records) == (["POST"], [])


async def test_a_server_that_ends_does_not_wait_for_a_body_that_nobody_reads() -> None:
    """Regression: its end waited for the rest of the body, up to its whole time."""
    has_come = asyncio.Event()

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        has_come.set()
        with suppress(ConnectionError):
            while True:  # until it does not listen any more
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                await asyncio.sleep(0.01)
        await application({**scope, "path": "/early"}, receive, send)

    async with served(late) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"\r\n" + BODY[:1])
        await has_come.wait()
    async with asyncio.timeout(patient(10)):
        assert (await reader.read()).startswith(b"HTTP/1.1 413")
        with suppress(ConnectionError):
            while True:  # until it is closed
                writer.write(BODY)
                await writer.drain()
                await asyncio.sleep(0.01)
    writer.close()


def test_http_1_0_gets_no_order_to_send_the_body() -> None:
    """A client of HTTP/1.0 would take it for the answer."""
    head = b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    answer = asyncio.run(told(head, BODY))
    assert answer.startswith(b"HTTP/1.1 200")
    assert said(answer)["method"] == "POST"


def test_http_1_1_gets_chunks() -> None:
    answer = asyncio.run(told(b"GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    assert answer.endswith(b"4\r\none \r\n4\r\ntwo \r\n5\r\nthree\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "begin",
    [
        b"GET / HTTP/1.1\r\nX-A: ",
        b"GET /",
        b"GET / HTTP/1.1\r\nX-",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-Trailer: ",
    ],
)
def test_a_head_without_end_is_refused(begin: bytes) -> None:
    async def send() -> tuple[bytes, int]:
        async with served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begin)
            num_sent = 0
            try:
                while not reader.at_eof() and num_sent < 64 * MAX_HEAD_BYTES:
                    writer.write(b"a" * 16_384)
                    await writer.drain()
                    num_sent += 16_384
                    await asyncio.sleep(0)
                return await reader.read(), num_sent
            except ConnectionError:
                return b"", num_sent
            finally:
                writer.close()

    answer, num_sent = asyncio.run(send())
    assert num_sent < 64 * MAX_HEAD_BYTES
    assert not answer or answer.startswith(b"HTTP/1.1 431"), answer


@pytest.mark.parametrize("cut", [None, 10, 200, MAX_HEAD_BYTES - 5])
@pytest.mark.parametrize("num_fields", [1, 50])
@pytest.mark.parametrize(("excess", "status"), [(0, b"200"), (1, b"431")])
def test_the_bound_of_a_head_does_not_depend_on_its_pieces(
    cut: int | None, num_fields: int, excess: int, status: bytes
) -> None:
    fields = [b"Connection: close\r\n", *[b"X-A: a\r\n"] * (num_fields - 1)]
    num_bytes = sum(map(len, fields)) + len(b"/" + b"X-B: \r\n")
    sent = b"GET / HTTP/1.1\r\n%bX-B: %b\r\n\r\n" % (b"".join(fields), b"b" * (MAX_HEAD_BYTES - num_bytes + excess))
    answer = asyncio.run(told(*([sent] if cut is None else [sent[:cut], sent[cut:]])))
    assert answer.startswith(b"HTTP/1.1 " + status)


def test_a_long_head_and_a_long_body_are_read() -> None:
    padding = b"X-A: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n"
    body = b"b" * (4 * MAX_HEAD_BYTES)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n" % len(body)
    assert said(asyncio.run(told(head + padding + b"\r\n", body)))["body"] == body.decode()


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET / HTTP/1.1\r\nHost", HEAD + b"\r\n" + BODY[:-1]])
def test_a_request_that_does_not_go_on_is_given_up(sent: bytes) -> None:
    assert asyncio.run(told(sent, silence_s=0.05)) == b""


@pytest.mark.parametrize(
    ("path", "kind"), [(b"/v1/completions", "server_error"), (b"/v1/messages", "overloaded_error")]
)
def test_beyond_the_bound_of_connections_the_answer_has_the_shape_of_its_api(path: bytes, kind: str) -> None:
    async def send() -> bytes:
        async with served(max_connections=1) as port, asked(port):
            return await talk(port, b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % path)

    head, _, body = asyncio.run(send()).partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 503", b"HTTP/1.1 529"))
    assert b"retry-after: 1" in head
    assert b"connection: close" in head
    assert orjson.loads(body)["error"]["type"] == kind


class FaultyClient(quire.AsyncClient):
    """A client whose fault breaks the handler that asks it."""

    async def model(self) -> quire.Model:
        raise RuntimeError("a fault")


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Send a request, and read its answer. Returns the status."""
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(patient(30)):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
    return head.split(b" ", 2)[1]


@asynccontextmanager
async def asked(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection whose request is under way: its head was read, and its body has not come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(HEAD + b"Expect: 100-continue\r\n\r\n")
        async with asyncio.timeout(patient(30)):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        yield reader, writer
    finally:
        writer.close()


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Send the body of such a request. Returns the answer's first bytes."""
    writer.write(BODY)
    async with asyncio.timeout(patient(30)):
        return (await read_answer(reader))[:12]


async def test_as_many_requests_as_may_be_under_way_are_served_while_further_ones_are_refused() -> None:
    async with served(max_connections=2) as port, asked(port) as first, asked(port) as second:
        further = await asyncio.open_connection("127.0.0.1", port)
        assert await ask(*further) == b"503"
        assert await further[0].read() == b""  # it is closed
        waiting = await asyncio.open_connection("127.0.0.1", port)
        assert await answered(*first) == b"HTTP/1.1 200"  # and is idle
        while await ask(*waiting) != b"200":  # the call may end after its answer
            waiting[1].close()
            waiting = await asyncio.open_connection("127.0.0.1", port)
        assert await ask(*first) == b"200"
        assert await answered(*second) == b"HTTP/1.1 200"
        for _, writer in (further, waiting):
            writer.close()


async def test_connections_that_wait_for_their_next_request_refuse_no_newcomer() -> None:
    async with served(max_connections=2) as port:
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _ in range(2):
            assert [await ask(*each) for each in kept] == [b"200"] * 3
        for _, writer in kept:
            writer.close()


async def test_the_connection_that_is_idle_longest_makes_room_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "MOST_BEYOND", 1)
    async with served(max_connections=2) as port:
        first, second, third = kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert [await ask(*second), await ask(*first), await ask(*third)] == [b"200"] * 3
        fourth = await asyncio.open_connection("127.0.0.1", port)
        assert await second[0].read() == b""
        assert [await ask(*each) for each in (first, third, fourth)] == [b"200"] * 3
        for _, writer in (*kept, fourth):
            writer.close()


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_probes_are_answered_beyond_the_bound(path: str) -> None:
    """Else a full gateway is taken for dead, and restarted with all its streams."""
    with capture_logs() as logs:
        async with served(max_connections=0) as port:
            answer = await talk(port, b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())
    assert answer.startswith(b"HTTP/1.1 200")
    assert logs == []


@pytest.mark.parametrize("sent", [b"", b"GET / HT"])
async def test_idle_connections_do_not_use_up_the_files(sent: bytes) -> None:
    """None would be left for a probe, nor for a call to the scheduler."""
    async with served(max_connections=1) as port, asked(port) as under_way:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        for _, writer in silent:
            writer.write(sent)
        async with asyncio.timeout(patient(30)):
            for reader, _ in silent[:-MOST_BEYOND]:
                with suppress(ConnectionResetError):  # of what was not read
                    assert await reader.read() == b""
        assert (await talk(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await answered(*under_way) == b"HTTP/1.1 200"
        for _, writer in silent:
            writer.close()


async def test_a_new_connection_is_closed_where_all_others_have_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "MOST_BEYOND", 0)
    async with served(max_connections=2) as port, asked(port) as first, asked(port) as second:
        assert await talk(port) == b""
        assert [await answered(*first), await answered(*second)] == [b"HTTP/1.1 200"] * 2


async def test_refused_requests_do_not_fill_the_log() -> None:
    with capture_logs() as logs:
        async with served(max_connections=0) as port:
            for _ in range(5):
                assert (await talk(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 503")
                assert (await talk(port, b"no HTTP\r\n\r\n")).startswith(b"HTTP/1.1 400")
    assert [(line["event"], line["times"]) for line in logs] == [
        ("requests refused: too many connections are open", 1),
        ("invalid HTTP received", 1),
    ]


@pytest.mark.parametrize(("max_connections", "status"), [(100, b"500"), (0, b"503")])
def test_scripts_of_web_pages_may_read_that_the_gateway_is_broken_or_busy(max_connections: int, status: bytes) -> None:
    origins = ["https://page.example"]
    app = for_web_pages(create_app(FaultyClient("127.0.0.1:1"), max_body_bytes=1 << 20), origins)

    async def send() -> bytes:
        async with served(app, busy=for_web_pages(answer_busy, origins), max_connections=max_connections) as port:
            page = b"Origin: https://page.example\r\nConnection: close\r\n\r\n"
            return await talk(port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + page)

    answer = asyncio.run(send())
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"access-control-allow-origin: https://page.example\r\n" in answer


async def test_a_client_that_takes_nothing_of_an_answer_is_cut_off() -> None:
    departed = asyncio.Event()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # the request
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(32 << 20), "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        departed.set()

    async with served(application, slow_reader_timeout_s=0.5) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(patient(30)):
                await departed.wait()
