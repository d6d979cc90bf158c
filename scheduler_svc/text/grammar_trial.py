"""Trial of grammars before workers get them: each is compiled for the model's vocabulary in a process with limits.

Grammars that passed are remembered, by their hash, and for a while those that were refused: a client may send one with
each of many requests. Owners take turns, so that one with many grammars, or with some that take all the time there is,
keeps no other waiting. Knows no requests, and no messages.
"""

import hashlib
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from common.faithful_tokenizer import faithful_tokenizer
from common.grammar_limits import STEP_MAX_ITEMS
from common.native_faults import shortened
from quire.errors import FailedPreconditionError
from scheduler_svc.text import grammar_program
from scheduler_svc.text.limited_process import IdleProcesses, LimitedProcess, ProcessEndedError
from scheduler_svc.text.shared_thread import SharedThread

_WALL_S = 4 * (grammar_program.READING_CPU_S + grammar_program.MAX_CPU_S)  # on a machine however busy
_MOST_IDLE = 1  # processes, each with a whole vocabulary
_MOST_REMEMBERED = 4096  # that passed, and as many that were refused
_REFUSED_S = 30.0  # for which a refusal is known: limits of time and memory may let it pass at another time
_MOST_ANSWER_BYTES = 65_536
_PROGRAM = Path(grammar_program.__file__)


class GrammarRefusedError(Exception):
    """The grammar cannot be compiled; the message says why, or which limit it exceeds."""


class GrammarTrial:
    """Tries grammars for one vocabulary, one at a time on a thread of its own."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: list[int]) -> None:
        tokenizer_json = faithful_tokenizer(tokenizer_json, vocab_size)  # as workers read it
        self._vocabulary = grammar_program.vocabulary_message(tokenizer_json, vocab_size, eos_token_ids, STEP_MAX_ITEMS)
        self._idle = IdleProcesses(_MOST_IDLE)
        self._thread = SharedThread("grammar-trial")
        # Only the thread changes these.
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # reason, and until when it is known

    async def check(self, grammar: str, owner: str = "") -> None:
        """Check a grammar.

        Raises GrammarRefusedError, or FailedPreconditionError if no grammar works with the model's tokenizer.
        """
        digest = hashlib.sha256(grammar.encode()).digest()
        if not self._has_passed(digest):
            await self._thread.run(owner, self._try_once, digest, grammar)

    def _has_passed(self, digest: bytes) -> bool:
        """True if it is known to pass. Raises GrammarRefusedError if it is known to be refused."""
        reason, until_s = self._refused.get(digest, ("", 0.0))
        if time.monotonic() < until_s:
            raise GrammarRefusedError(reason)
        return digest in self._passed

    def _try_once(self, digest: bytes, grammar: str) -> None:
        """Try a grammar, unless that was done for another request while this one waited."""
        if self._has_passed(digest):
            return
        try:
            self._try(grammar)
        except GrammarRefusedError as error:
            self._refused.pop(digest, None)
            self._refused[digest] = str(error), time.monotonic() + _REFUSED_S
            _forget_oldest(self._refused)
            raise
        self._passed[digest] = None
        _forget_oldest(self._passed)

    def _try(self, grammar: str) -> None:
        try:
            process = self._idle.take() or LimitedProcess(_PROGRAM, self._vocabulary)
            kind, said = process.ask(grammar.encode(), wall_s=_WALL_S, most_bytes=_MOST_ANSWER_BYTES)
        except ProcessEndedError:
            raise GrammarRefusedError(
                f"it takes more than {grammar_program.MAX_CPU_S} s or {grammar_program.MAX_MEMORY_BYTES >> 30} GiB to "
                "compile, or nests too deep: simplify it"
            ) from None
        self._idle.put_back(process)
        reason = shortened(Exception(" ".join(said.decode().split())))
        if kind == grammar_program.NO_TOKENIZER:
            raise FailedPreconditionError(f"structured outputs do not work with the model's tokenizer: {reason}")
        if kind == grammar_program.REFUSED:
            raise GrammarRefusedError(reason)


def _forget_oldest(remembered: OrderedDict[bytes, Any]) -> None:
    if len(remembered) > _MOST_REMEMBERED:
        remembered.popitem(last=False)
