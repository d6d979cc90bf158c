"""Runner: `quire serve MODEL` as a user types it, asked over HTTP.

Its flags are its own, but for the port of the gateway: of what the peers are told it takes the model alone.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers.runners.harness import Recorder, Setup, serve
from benchmarks.peers.runners.http_client import HOST, free_port, run_requests, wait_ready
from quire import Client

_COMMAND = Path(sys.executable).with_name("quire")
_READY_S = 300.0  # on a processor for which kernels have to be compiled first
_END_S = 30.0


class QuireHttp:
    """The supervisor and the processes it starts: store, scheduler, worker and gateway."""

    def __init__(self, setup: Setup) -> None:
        self._port, grpc_port = free_port(), free_port()
        self._drawing: dict[str, Any] = dict(setup.drawing)
        with ExitStack() as opened:
            state = opened.enter_context(tempfile.TemporaryDirectory())
            address = f"{HOST}:{grpc_port}"
            process = subprocess.Popen(
                [str(_COMMAND), "serve", setup.model, "--http", f"{HOST}:{self._port}", "--listen", address],
                env={**os.environ, "XDG_STATE_HOME": state},
                stdout=sys.stderr,
            )
            opened.callback(_end, process)
            wait_ready(process, self._port, "/ready", _READY_S)
            with Client(address) as client:
                self.computes_in = client.model().dtype
            self._opened = opened.pop_all()

    def run(self, recorder: Recorder) -> None:
        asyncio.run(run_requests(self._port, recorder, self._drawing))

    def close(self) -> None:
        self._opened.close()


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait(_END_S)


if __name__ == "__main__":
    serve(QuireHttp, ("quire-llm", "torch"))
