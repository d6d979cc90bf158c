"""Runner: `transformers.generate`, batches of a fixed size padded to their longest prompt; size 1 is the reference."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.runners.harness import Recorder, Request, Setup, drive_batches, serve

_BATCH_SIZE = 8


class Static:
    """Static batches. A token's time is that of its step, though `generate` returns only at the end of the batch."""

    def __init__(self, setup: Setup) -> None:
        self.computes_in = setup.dtype
        torch.set_num_threads(setup.threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, setup.dtype))
        self._model.train(False)
        self._size = setup.options.get("batch_size", _BATCH_SIZE)

    def run(self, recorder: Recorder) -> None:
        drive_batches(self._run_batch, self._size, recorder)

    def close(self) -> None:
        pass

    def _run_batch(self, batch: Sequence[Request], recorder: Recorder) -> None:
        width = max(len(each.prompt) for each in batch)
        padding = [width - len(each.prompt) for each in batch]
        tokens = [[0] * pad + each.prompt for pad, each in zip(padding, batch, strict=True)]
        mask = [[0] * pad + [1] * len(each.prompt) for pad, each in zip(padding, batch, strict=True)]
        longest = max(each.num_output for each in batch)
        with torch.inference_mode():
            self._model.generate(
                input_ids=torch.tensor(tokens),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[partial(_record_step, batch, recorder)],
            )


def _record_step(
    batch: Sequence[Request], recorder: Recorder, input_ids: torch.Tensor, scores: object, **_: object
) -> torch.Tensor:
    """Record a step's tokens; called after every step, never stops generation."""
    for request, token in zip(batch, input_ids[:, -1].tolist(), strict=True):
        recorder.record_tokens(request.index, [token])
    return torch.zeros(len(batch), dtype=torch.bool)


if __name__ == "__main__":
    serve(Static, ("transformers", "torch"))
