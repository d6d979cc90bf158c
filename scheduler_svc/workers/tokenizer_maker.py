"""Tokenizer of a worker's model: tried in a process of its own first, one after another, each once.

Reading a large file here blocks the interpreter for longer than a lease lives, so the lease is held longer meanwhile.
Knows the files and the served model, not the worker.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from quire.errors import FailedPreconditionError, UnavailableError
from quire.v1 import worker_pb2
from scheduler_svc.requests.params.served_model import ServedModel
from scheduler_svc.text.tokenizer import ModelTokenizer
from scheduler_svc.text.tokenizer_trial import TokenizerProcesses

MAX_WAITING = 16  # each with its files in memory
_SLOWER = 4  # than the trial was, on a machine that others use, too
REFUSED_FOR_S = 30.0  # then the same files are tried again: the machine may have been too busy


class TokenizerMaker:
    """One per process. `known` returns the served model; `longer` holds our lease for so many seconds more."""

    def __init__(
        self, known: Callable[[], ServedModel | None], longer: Callable[[float], AbstractAsyncContextManager[None]]
    ) -> None:
        self._known = known
        self._longer = longer
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self._last: tuple[bytes, ModelTokenizer | str] = b"", ""  # by digest of the files; or why they are refused
        self._tried_s = 0.0

    @property
    def known_fingerprint(self) -> str:
        """Fingerprint of the served model's tokenizer; empty while there is none."""
        known = self._known()
        return known.tokenizer_fingerprint if known is not None else ""

    async def make(self, description: worker_pb2.DescribeResponse) -> ModelTokenizer | None:
        """Tokenizer of these files, which may be in use already; None for a model without one.

        Raises FailedPreconditionError if the files cannot be read, UnavailableError if too many others wait.
        """
        if not description.HasField("tokenizer"):
            return None
        if self._num_waiting >= MAX_WAITING:
            raise UnavailableError("tokenizers of many other workers are being tried: this one will be asked again")
        self._num_waiting += 1
        try:
            async with self._lock:
                return await self._make(description)
        finally:
            self._num_waiting -= 1

    async def _make(self, description: worker_pb2.DescribeResponse) -> ModelTokenizer | None:
        known, files = self._known(), description.tokenizer
        if known is not None and known.tokenizer is not None:
            if known.tokenizer_fingerprint == files.fingerprint:
                return known.tokenizer
            if known.fingerprint == description.model.fingerprint:
                return None  # it is refused for the difference
        digest = await asyncio.to_thread(_digest, files)
        made = self._last[1] if digest == self._last[0] else None
        if made is None or (isinstance(made, str) and time.monotonic() > self._tried_s + REFUSED_FOR_S):
            made = await self._tried(files)
            self._last, self._tried_s = (digest, made), time.monotonic()
        if isinstance(made, str):
            raise FailedPreconditionError(made)
        return made

    async def _tried(self, files: worker_pb2.TokenizerFiles) -> ModelTokenizer | str:
        """Tokenizer, or the reason why there is none."""
        processes = TokenizerProcesses(files.tokenizer_json)
        try:
            is_usual = await asyncio.to_thread(processes.try_out)
            async with self._longer(processes.read_s * _SLOWER):
                return await asyncio.to_thread(
                    ModelTokenizer,
                    files.tokenizer_json,
                    files.chat_template,
                    dict(files.special_tokens),
                    None if is_usual else processes,
                )
        except ValueError as error:
            return str(error)


def _digest(files: worker_pb2.TokenizerFiles) -> bytes:
    rest = repr((files.chat_template, sorted(files.special_tokens.items()))).encode()
    return hashlib.sha256(hashlib.sha256(files.tokenizer_json).digest() + rest).digest()
