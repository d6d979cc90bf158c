"""Runner: `quire serve MODEL` as a user types it, journal included, asked through the SDK by this process.

Its flags are its own, none by default: of what the peers are told it takes the model alone.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.peers.runners.harness import Recorder, Request, Setup, serve
from quire import AsyncClient

_COMMAND = Path(sys.executable).with_name("quire")
_HOST, _PORT = "127.0.0.1", 7847  # where `quire serve` listens by itself
_READY_S = 300.0  # on a processor for which kernels have to be compiled first
_END_S = 30.0


class Quire:
    """The supervisor and the processes it starts: store, scheduler and worker, with data in a folder of their own."""

    def __init__(self, setup: Setup) -> None:
        socket.create_server((_HOST, _PORT)).close()  # nobody else is measured
        with ExitStack() as opened:
            state = opened.enter_context(tempfile.TemporaryDirectory())
            process = subprocess.Popen(
                [str(_COMMAND), "serve", setup.model, *setup.options.get("flags", ())],
                env={**os.environ, "XDG_STATE_HOME": state},
                stdout=sys.stderr,
            )
            opened.callback(_end, process)
            self._loop = opened.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
            self._client = self._loop.run(_connected(process))
            self._drawing: dict[str, Any] = dict(setup.drawing)
            self.computes_in = self._loop.run(self._client.model()).dtype
            self._opened = opened.pop_all()

    def run(self, recorder: Recorder) -> None:
        self._loop.run(self._run(recorder))

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._opened.close()

    async def _run(self, recorder: Recorder) -> None:
        await asyncio.gather(*(self._converse(recorder, each) for each in recorder.requests if each.follows is None))

    async def _converse(self, recorder: Recorder, request: Request | None) -> None:
        """Send a request, and those of the turns behind it."""
        while request is not None:
            await self._one(recorder, request)
            request = recorder.next_turn(request.index)

    async def _one(self, recorder: Recorder, request: Request) -> None:
        await asyncio.sleep(max(0.0, request.arrival_s - recorder.now_s()))
        recorder.record_sent(request.index)
        stream = self._client.stream(request.prompt, max_tokens=request.num_output, ignore_eos=True, **self._drawing)
        async for chunk in stream:
            recorder.record_tokens(request.index, chunk.token_ids)


async def _connected(process: subprocess.Popen[bytes]) -> AsyncClient:
    """Connect to the service once it is ready. Raises RuntimeError if the process ends before."""
    client = AsyncClient(f"{_HOST}:{_PORT}")
    ready = asyncio.ensure_future(client.wait_ready(_READY_S))
    while not ready.done():
        if process.poll() is not None:
            ready.cancel()
            raise RuntimeError(f"quire serve ended with {process.returncode}")
        await asyncio.wait([ready], timeout=0.1)
    await ready
    return client


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait(_END_S)


if __name__ == "__main__":
    serve(Quire, ("quire-llm", "torch"))
