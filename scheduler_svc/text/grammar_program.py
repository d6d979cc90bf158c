"""Grammars of requests in a process of their own: this file is run by path, and imports nothing but llguidance.

A grammar is a program of a user's: it may nest so deep that the compiler ends its process, or grow without bound. So it
is compiled here first, with limits of CPU time, memory and stack, before a worker gets it, which has a larger stack.
Messages on the pipes are a length and so many bytes: first the vocabulary, as a line of JSON and the tokenizer.json,
then grammars, each with one answer. It knows no requests and no workers.
"""

import json
import resource
import signal
import struct
import sys
import threading
from typing import BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LENGTH = struct.Struct("<I")
USABLE, REFUSED, NO_TOKENIZER = b"u", b"r", b"t"  # what an answer begins with

MAX_CPU_S = 0.5  # of one grammar; a usual schema takes 0.002 s
MAX_MEMORY_BYTES = 1 << 30  # of the whole process, with a tokenizer.json of 15 MB 250 MB
READING_CPU_S = 20.0  # of the tokenizer
_STACK_BYTES = 1 << 20
_MAX_REASON_CHARS = 1000
_STATE = "<state>"  # what the library tells of itself behind a reason
_NO_EXTENSION = "NoExtensionBias"  # the library's word where no text meets a grammar
_NO_TEXT = "no text meets it: it contradicts itself, or its rules or references lead back to themselves"


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers until the other end closes its pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    vocabulary = _read(requests)
    read: tuple[LLTokenizer, LLParserLimits] | None = None
    while vocabulary is not None and (grammar := _read(requests)) is not None:
        try:
            if read is None:
                signal.setitimer(signal.ITIMER_PROF, READING_CPU_S)  # the system ends the process at the limit
                read = _read_vocabulary(vocabulary)
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
            reason = _fault_within_stack(*read, grammar.decode())
            answer = REFUSED + _encoded(reason) if reason else USABLE
        except BaseException as error:  # the library panics
            kind = NO_TOKENIZER if read is None else REFUSED
            answer = kind + _encoded(str(error) or type(error).__name__)
        signal.setitimer(signal.ITIMER_PROF, 0)  # the next request is read in its own time
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


def vocabulary_message(tokenizer_json: bytes, vocab_size: int, eos_token_ids: list[int], step_max_items: int) -> bytes:
    """First message to the process. `step_max_items`: the parser's limit, the same on workers."""
    return json.dumps([vocab_size, eos_token_ids, step_max_items]).encode() + b"\n" + tokenizer_json


def _read_vocabulary(message: bytes) -> tuple[LLTokenizer, LLParserLimits]:
    head, tokenizer_json = message.split(b"\n", 1)
    vocab_size, eos_token_ids, step_max_items = json.loads(head)
    tokenizer = LLTokenizer(tokenizer_json.decode(), n_vocab=vocab_size, eos_token=eos_token_ids)
    return tokenizer, LLParserLimits(step_max_items=step_max_items)


def _fault_within_stack(tokenizer: LLTokenizer, limits: LLParserLimits, grammar: str) -> str:
    """Fault of a grammar, found on a thread of its own; empty if it has none."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_fault(tokenizer, limits, grammar)))
    thread.start()
    thread.join()
    return found[0] if found else "it cannot be compiled"


def _fault(tokenizer: LLTokenizer, limits: LLParserLimits, grammar: str) -> str:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if not matcher.is_error() and not any(mask):
        return "no token of the model can begin it"
    if not matcher.is_error():  # workers look at the text that is certain, which may go beyond a limit of the library
        matcher.consume_tokens(matcher.compute_ff_tokens()[:1])
    reason = matcher.get_error().partition(_STATE)[0].strip() if matcher.is_error() else ""
    return _NO_TEXT if reason == _NO_EXTENSION else reason


def _encoded(reason: str) -> bytes:
    return reason[:_MAX_REASON_CHARS].encode("utf-8", "replace")


def _read(requests: BinaryIO) -> bytes | None:
    head = requests.read(LENGTH.size)
    return requests.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
