"""Runner: CTranslate2's generator. It has no continuous batching: what waits makes a batch, which runs to its end."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2
from ctranslate2.converters import TransformersConverter

from benchmarks.peers.runners.harness import Recorder, Request, Setup, drive_batches, serve


class Translate:
    """CTranslate2's generator; a request leaves its batch when it has its length."""

    def __init__(self, setup: Setup) -> None:
        folder = converted(setup)
        can = ctranslate2.get_supported_compute_types("cpu")
        compute_type = setup.dtype if setup.dtype in can else "float32"
        self._generator: Any = ctranslate2.Generator(
            str(folder), device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=setup.threads
        )
        self.computes_in = self._generator.compute_type
        self._vocabulary: list[str] = json.loads((folder / "vocabulary.json").read_text())
        self._size = setup.max_num_seqs

    def run(self, recorder: Recorder) -> None:
        drive_batches(self._run_batch, self._size, recorder)

    def close(self) -> None:
        pass

    def _run_batch(self, batch: Sequence[Request], recorder: Recorder) -> None:
        # Steps count from the end of the shortest prompt. While they are within a longer prompt it says nothing, but
        # where the shortest has one token: then it calls back for prompt tokens, and `max_length` includes them.
        shortest = min(len(each.prompt) for each in batch)
        echoes = [len(each.prompt) - shortest for each in batch]
        longest = max(
            each.num_output + (echo if shortest == 1 else 0) for each, echo in zip(batch, echoes, strict=True)
        )

        def record_result(result: Any) -> bool:
            request = batch[result.batch_id]
            if result.step < echoes[result.batch_id]:
                return False
            recorder.record_tokens(request.index, [result.token_id])
            return recorder.is_complete(request.index)

        self._generator.generate_batch(
            [[self._vocabulary[token] for token in each.prompt] for each in batch],
            beam_size=1,
            sampling_topk=1,
            max_length=longest,
            min_length=longest,
            include_prompt_in_result=False,
            callback=record_result,
        )


def converted(setup: Setup) -> Path:
    """Convert the model for CTranslate2, once."""
    folder = Path(setup.cache) / f"ctranslate2-{setup.dtype}"
    if not folder.is_dir():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        TransformersConverter(setup.model).convert(str(partial), quantization=setup.dtype)
        partial.rename(folder)
    return folder


if __name__ == "__main__":
    serve(Translate, ("ctranslate2", "transformers", "torch"))
