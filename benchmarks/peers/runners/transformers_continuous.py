"""Runner: the continuous batching of `transformers`, with its own background thread."""

import threading
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.peers.runners.harness import Recorder, Setup, serve


class Continuous:
    """One manager for all loads; it says when each token was made."""

    def __init__(self, setup: Setup) -> None:
        self.computes_in = setup.dtype
        torch.set_num_threads(setup.threads)
        model: Any = AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=getattr(torch, setup.dtype), attn_implementation="paged|sdpa"
        )
        untyped: Any = GenerationConfig
        generation = untyped(do_sample=False, max_new_tokens=1)
        generation.eos_token_id, generation.pad_token_id = -1, 0  # nothing ends before its length
        config = ContinuousBatchingConfig(
            **{"allow_block_sharing": False, "auto_switch_to_flash": False} | setup.options
        )
        model.eval()
        self._context = model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config
        )
        self._manager = self._context.__enter__()
        self._num_loads = 0

    def run(self, recorder: Recorder) -> None:
        self._num_loads += 1
        sender = threading.Thread(target=self._send, args=(recorder,))
        sender.start()
        num_open = len(recorder.requests)
        while num_open:
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("its generation thread ended")
                continue
            if result.error is not None:
                raise RuntimeError(str(result.error))
            if result.is_finished():
                index = int(result.request_id.rpartition(" ")[2])
                recorder.record_tokens(index, result.generated_tokens)
                recorder.token_s[index] = [moment - recorder.began_s for moment in result.timestamps]
                num_open -= 1
        sender.join()

    def close(self) -> None:
        self._context.__exit__(None, None, None)

    def _send(self, recorder: Recorder) -> None:
        for request in recorder.requests:
            time.sleep(max(0.0, request.arrival_s - recorder.now_s()))
            recorder.record_sent(request.index)
            self._manager.add_request(
                request.prompt,
                request_id=f"{self._num_loads} {request.index}",
                max_new_tokens=request.num_output,
                record_timestamps=True,
                eos_token_id=-1,
            )


if __name__ == "__main__":
    serve(Continuous, ("transformers", "torch"))
