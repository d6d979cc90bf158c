"""Runner: `quire serve MODEL` as a user types it, asked over HTTP.

Its flags are its own, but for its ports: of what the peers are told it takes the model alone.
"""

import sys
import tempfile
from pathlib import Path

from benchmarks.peers.runners.harness import Setup, serve
from benchmarks.peers.runners.http_client import HOST, Server, free_port
from quire import Client

_COMMAND = Path(sys.executable).with_name("quire")
_READY_S = 300.0  # on a processor for which kernels have to be compiled first


class QuireHttp(Server):
    """The supervisor and the processes it starts: store, scheduler, worker and gateway."""

    def __init__(self, setup: Setup) -> None:
        self._state = tempfile.TemporaryDirectory()
        port, address = free_port(), f"{HOST}:{free_port()}"
        super().__init__(
            [str(_COMMAND), "serve", setup.model, "--http", f"{HOST}:{port}", "--listen", address],
            port,
            setup.drawing,
            variables={"XDG_STATE_HOME": self._state.name},
            ready_path="/ready",
            ready_s=_READY_S,
        )
        with Client(address) as client:
            self.computes_in = client.model().dtype

    def close(self) -> None:
        super().close()
        self._state.cleanup()


if __name__ == "__main__":
    serve(QuireHttp, ("quire-llm", "torch"))
