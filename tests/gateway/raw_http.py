"""HTTP as bytes: a server of a small application in this process, and its answers."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway_svc.error_answer import answer_busy
from gateway_svc.http_server import HttpServer
from gateway_svc.key_check import OPEN_PATHS
from gateway_svc.listening import listening_socket
from tests.patience import patient

BODY = b'{"prompt": "x"}'
HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(BODY)
OFFER = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
PATIENT_S = 3600.0


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Tell what came; at /stream in three pieces without a length, at /early before the body is read."""
    if scope["path"] == "/early":
        await Response("no", 413)(scope, receive, send)
        return
    request = Request(scope, receive)
    body = (await request.body()).decode()
    response: Response
    if scope["path"] == "/stream":

        async def pieces() -> AsyncIterator[bytes]:
            for each in (b"one ", b"two ", b"three"):
                yield each

        response = StreamingResponse(pieces())
    else:
        told = {"method": scope["method"], "body": body, "names": sorted(request.headers.keys())}
        response = JSONResponse({**told, "upgrade": request.headers.get("upgrade")})
    await response(scope, receive, send)


@asynccontextmanager
async def served(
    app: ASGIApp = application,
    *,
    busy: ASGIApp = answer_busy,
    max_connections: int = 100,
    silence_s: float = PATIENT_S,
    slow_reader_timeout_s: float = PATIENT_S,
) -> AsyncIterator[int]:
    """The port of a server of an application."""
    server = HttpServer(
        app,
        max_connections=max_connections,
        drain_timeout_s=0,
        busy=busy,
        open_paths=OPEN_PATHS,
        silence_s=silence_s,
    )
    sock = listening_socket("127.0.0.1:0", shares_port=False, slow_reader_timeout_s=slow_reader_timeout_s)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def talk(port: int, *pieces: bytes) -> bytes:
    """Send these pieces. Returns the answers, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(patient(30)):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def said(answer: bytes) -> dict[str, Any]:
    """The JSON object of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), answer
    found: dict[str, Any] = orjson.loads(body)
    return found


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    """The next answer of a connection, by its length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    return head + await reader.readexactly(int(length[1]))


async def told(*pieces: bytes, **options: Any) -> bytes:
    async with served(**options) as port:
        return await talk(port, *pieces)
