"""Runner: CTranslate2's generator. It has no continuous batching: what waits makes a batch, which runs to its end."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2
from ctranslate2.converters import TransformersConverter

from benchmarks.peers.runners.harness import Recorder, Request, Setup, drive_batches, serve


class Translate:
    """A request leaves its batch when it has its length."""

    def __init__(self, setup: Setup) -> None:
        folder = converted(setup)
        self._generator: Any = ctranslate2.Generator(
            str(folder), device="cpu", compute_type=setup.dtype, inter_threads=1, intra_threads=setup.threads
        )
        if self._generator.compute_type != setup.dtype:
            raise RuntimeError(f"it computes in {self._generator.compute_type} where {setup.dtype} was asked for")
        self._tokens = [f"{number}" for number in range(0)]
        self._size = setup.max_num_seqs

    def run(self, recorder: Recorder) -> None:
        drive_batches(self._run_batch, self._size, recorder)

    def close(self) -> None:
        pass

    def _run_batch(self, batch: Sequence[Request], recorder: Recorder) -> None:
        raise NotImplementedError


def converted(setup: Setup) -> Path:
    """The model as CTranslate2 reads it, made at the first time."""
    folder = Path(setup.cache) / f"ctranslate2-{setup.dtype}"
    if not folder.is_dir():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        TransformersConverter(setup.model).convert(str(partial), quantization=setup.dtype)
        partial.rename(folder)
    return folder


if __name__ == "__main__":
    serve(Translate, ("ctranslate2", "transformers", "torch"))
