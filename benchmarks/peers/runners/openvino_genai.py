"""Runner: the continuous batching of OpenVINO GenAI. The checkpoint is converted once, by optimum-intel.

Its weights are kept in the precision of the run; it computes and keeps KV in it where the CPU can, else in float32.
"""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.runners.harness import Recorder, Request, Setup, drive_steps, serve

_BLOCK_SIZE = 32  # of its CPU plugin
_NO_TOP_K = 2**63 - 1  # its default without a generation_config.json is off, too
_PRECISION = {"bfloat16": "bf16", "float32": "f32"}


class OpenVino:
    """Pipeline of OpenVINO GenAI, stepped from here."""

    def __init__(self, setup: Setup) -> None:
        can = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        precision = "bf16" if setup.dtype == "bfloat16" and "BF16" in can else "f32"
        self.computes_in = {"bf16": "bfloat16", "f32": "float32"}[precision]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = -(-setup.pool_tokens // _BLOCK_SIZE)
        scheduler.max_num_seqs = setup.max_num_seqs
        scheduler.max_num_batched_tokens = setup.step_tokens
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = setup.caches_prefixes
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": setup.threads,
            **setup.options,
        }
        folder = converted(setup)
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._top_p = setup.top_p
        self._handles: dict[int, Any] = {}
        self._num_requests = 0

    def run(self, recorder: Recorder) -> None:
        drive_steps(self, recorder)

    def add(self, request: Request) -> None:
        generation = openvino_genai.GenerationConfig()
        generation.do_sample, generation.ignore_eos = self._top_p is not None, True
        if self._top_p is not None:
            generation.temperature, generation.top_p, generation.top_k = 1.0, self._top_p, _NO_TOP_K
        generation.max_new_tokens = generation.min_new_tokens = request.num_output
        prompt = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        self._num_requests += 1
        self._handles[request.index] = self._pipeline.add_request(self._num_requests, prompt, generation)

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        self._pipeline.step()
        for index, handle in list(self._handles.items()):
            tokens: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
            if tokens:
                yield index, tokens
        if not self._pipeline.has_non_finished_requests():
            self._handles.clear()

    def close(self) -> None:
        pass


def converted(setup: Setup) -> Path:
    """Convert the model for OpenVINO, once."""
    folder = Path(setup.cache) / f"openvino-{setup.dtype}"
    if not (folder / "done").is_file():
        command = [sys.executable, "-m", "benchmarks.peers.runners.openvino_convert", setup.model, str(folder)]
        subprocess.run([*command, _PRECISION[setup.dtype]], check=True, stdout=sys.stderr)
        (folder / "done").touch()
    return folder


if __name__ == "__main__":
    serve(OpenVino, ("openvino", "openvino-genai", "optimum-intel"))
