"""A client of `/v1/completions`, as servers of OpenAI's API have it: streams of token ids, on the standard library.

It runs in every peer's environment, so no peer's client is faster. Knows a port of this machine, not whose it is.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.runners.harness import Recorder, Request

HOST = "127.0.0.1"
_EVENT = b"data: "
_DONE = b"[DONE]"
_POLL_S = 0.1
_END_S = 60.0


class HttpError(Exception):
    """Failure of a server: it ended, or refused a request."""


class Server:
    """A server's process, which is asked over HTTP. An `Engine`, but for what it computes in."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        fields: Mapping[str, Any],
        *,
        variables: Mapping[str, str],
        ready_path: str,
        ready_s: float,
    ) -> None:
        """Start it and wait until the path answers. `fields`: of each request. Raises HttpError."""
        self._port, self._fields = port, fields
        self._process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=sys.stderr)
        try:
            wait_ready(self._process, port, ready_path, ready_s)
        except BaseException:
            self.close()
            raise

    def run(self, recorder: Recorder) -> None:
        asyncio.run(run_requests(self._port, recorder, self._fields))

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._process.wait(_END_S)


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def wait_ready(process: "subprocess.Popen[bytes]", port: int, path: str, limit_s: float) -> None:
    """Wait until a path answers with 200. Raises HttpError if the server ends before, or takes longer."""
    give_up_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            raise HttpError(f"the server ended with {process.returncode}")
        try:
            with socket.create_connection((HOST, port), timeout=5.0) as connection:
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
                if connection.recv(64).split(b" ")[1:2] == [b"200"]:
                    return
        except OSError:
            pass
        time.sleep(_POLL_S)
    raise HttpError(f"the server is not ready after {limit_s:g} s")


async def run_requests(port: int, recorder: Recorder, fields: Mapping[str, Any]) -> None:
    """Send every request at its time, with these fields besides its own, each over a connection of its own."""
    await asyncio.gather(*(_one(port, recorder, each, fields) for each in recorder.requests))


async def _one(port: int, recorder: Recorder, request: Request, fields: Mapping[str, Any]) -> None:
    await asyncio.sleep(max(0.0, request.arrival_s - recorder.now_s()))
    body = json.dumps(
        {
            "prompt": request.prompt,
            "max_tokens": request.num_output,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **fields,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    recorder.record_sent(request.index)
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if status.split(b" ")[1:2] != [b"200"]:
            raise HttpError(f"{status!r}: {(await reader.read())[:500]!r}")
        while line := await reader.readline():
            # Lines of chunked transfer coding are no events.
            if line.startswith(_EVENT) and not line.startswith(_EVENT + _DONE):
                for choice in json.loads(line[len(_EVENT) :])["choices"]:
                    recorder.record_tokens(request.index, choice.get("token_ids") or ())
    finally:
        writer.close()
    if not recorder.is_complete(request.index):
        raise HttpError(f"request {request.index} ended after {len(recorder.token_ids[request.index])} tokens")
