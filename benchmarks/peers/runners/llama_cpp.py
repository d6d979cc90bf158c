"""Runner: llama.cpp, one batch of all sequences a step, from one KV buffer, the checkpoint as GGUF.

It keeps KV in half precision where weights are bfloat16, its default, and in float32 where they are that.
"""

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.runners.gguf_file import write_gguf
from benchmarks.peers.runners.harness import Recorder, Request, Setup, drive_steps, serve

_KV_TYPES = {"bfloat16": llama_cpp.GGML_TYPE_F16, "float32": llama_cpp.GGML_TYPE_F32}


@dataclass(slots=True)
class _Sequence:
    request: Request
    stream: int
    position: int  # of the next token
    new: list[int]  # tokens that are to be computed


class LlamaCpp:
    """llama.cpp with greedy choice: numpy finds the largest logit."""

    def __init__(self, setup: Setup) -> None:
        self.computes_in = setup.dtype
        llama_cpp.llama_backend_init()
        file = Path(setup.cache) / f"{setup.dtype}.gguf"
        if not file.is_file():
            write_gguf(Path(setup.model), file)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = setup.max_num_seqs * setup.max_len
        params.n_seq_max = setup.max_num_seqs
        params.n_batch, params.n_ubatch = setup.step_tokens, setup.options.get("n_ubatch", 512)
        params.n_threads = params.n_threads_batch = setup.threads
        params.type_k = params.type_v = _KV_TYPES[setup.dtype]
        params.kv_unified = True  # one buffer for all sequences, its faster mode
        self._model: Any = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        self._context: Any = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp could not create a context")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(setup.step_tokens, 0, 1)
        self._step_tokens = setup.step_tokens
        self._free = list(range(setup.max_num_seqs))
        self._waiting: deque[Request] = deque()
        self._live: list[_Sequence] = []

    def run(self, recorder: Recorder) -> None:
        drive_steps(self, recorder)

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        """Run one step: decoding sequences first, the rest of the batch for prompts, in their order."""
        while self._waiting and self._free:
            request = self._waiting.popleft()
            self._live.append(_Sequence(request, self._free.pop(), 0, list(request.prompt)))
        asked: list[_Sequence] = []
        self._batch.n_tokens = 0
        for sequence in sorted(self._live, key=lambda each: len(each.new) > 1):
            room = self._step_tokens - self._batch.n_tokens
            chunk, sequence.new = sequence.new[:room], sequence.new[room:]
            self._put_chunk(sequence, chunk)
            if chunk and not sequence.new:
                asked.append(sequence)
        if llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError("llama.cpp failed to decode a batch")
        if not asked:
            return
        logits = np.ctypeslib.as_array(
            ctypes.cast(llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float)),
            (len(asked), self._vocab_size),
        )
        for sequence, token in zip(asked, logits.argmax(axis=1).tolist(), strict=True):
            sequence.new = [token]
            num_made = sequence.position - len(sequence.request.prompt) + 1
            if num_made == sequence.request.num_output:
                self._live.remove(sequence)
                memory = llama_cpp.llama_get_memory(self._context)
                llama_cpp.llama_memory_seq_rm(memory, sequence.stream, -1, -1)
                self._free.append(sequence.stream)
            yield sequence.request.index, [token]

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def _put_chunk(self, sequence: _Sequence, chunk: Sequence[int]) -> None:
        batch = self._batch
        for token in chunk:
            place = batch.n_tokens
            batch.token[place] = token
            batch.pos[place] = sequence.position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = sequence.stream
            batch.logits[place] = 0
            sequence.position += 1
            batch.n_tokens += 1
        if chunk and not sequence.new:
            batch.logits[batch.n_tokens - 1] = 1


if __name__ == "__main__":
    serve(LlamaCpp, ("llama-cpp-python",))
