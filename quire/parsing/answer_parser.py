"""The parser of one answer: text in pieces of any size in, deltas out.

A function of the text and of what the prompt has opened, so that a client that resumes at a position, or asks again,
gets the same: nothing of it is kept by a server. What does not parse is content, and never an error; no more than
`MAX_HELD_CHARS` and a piece are held.
"""

import hashlib
from collections.abc import Callable

from quire.parsing.answer_format import AnswerFormat
from quire.parsing.deepseek import read_deepseek
from quire.parsing.deltas import ContentDelta, Delta
from quire.parsing.harmony import read_harmony
from quire.parsing.hermes import read_hermes
from quire.parsing.llama3 import read_llama3
from quire.parsing.mistral import read_mistral
from quire.parsing.output import Output
from quire.parsing.source import Reading, Source
from quire.parsing.think_tags import TAGS, read_reasoning

_CALLS: dict[str, Callable[[Source, Output], Reading[None]]] = {
    "deepseek": read_deepseek,
    "hermes": read_hermes,
    "mistral": read_mistral,
}
_MISTRAL_ID_CHARS = 9  # its templates refuse others


class AnswerParser:
    """Parses one output of a request; `in_reasoning`: its prompt ends within reasoning (`Accepted.in_reasoning`)."""

    def __init__(self, format: AnswerFormat, request_id: str, sample: int = 0, *, in_reasoning: bool = False) -> None:
        self._is_plain = format.is_plain  # so most are: nothing is read for them
        self._is_forced = format.is_forced
        self._source = Source()
        self._output = Output(lambda index: call_id(format, request_id, sample, index))
        self._reading = _read_answer(self._source, self._output, format, in_reasoning)

    def push(self, text: str) -> tuple[Delta, ...]:
        """Parse the next text of the answer."""
        if self._is_plain:
            self._output.content(text)
        else:
            self._source.feed(text)
            next(self._reading, None)
        return self._taken()

    def end(self) -> tuple[Delta, ...]:
        """Release what was held back, after the last text. Call it once."""
        self._source.end()
        next(self._reading, None)
        self._output.end()
        return self._taken()

    def _taken(self) -> tuple[Delta, ...]:
        deltas = self._output.take()
        return tuple(each for each in deltas if not isinstance(each, ContentDelta)) if self._is_forced else deltas


def call_id(format: AnswerFormat, request_id: str, sample: int, index: int) -> str:
    """Id of a call, which a retry and a resumed stream give again."""
    digest = hashlib.sha256(f"{request_id}\n{sample}\n{index}".encode()).hexdigest()
    return digest[:_MISTRAL_ID_CHARS] if format.tool_parser == "mistral" else f"call_{digest[:24]}"


def template_call_id(format: AnswerFormat, given: str) -> str:
    """Id of a call as the templates of a format take it, for an id that may have another form; one gives one."""
    if format.tool_parser != "mistral":
        return given
    bare = given.rpartition("_")[2]
    if len(bare) == _MISTRAL_ID_CHARS and bare.isascii() and bare.isalnum():
        return bare
    return hashlib.sha256(given.encode()).hexdigest()[:_MISTRAL_ID_CHARS]


def _read_answer(source: Source, output: Output, format: AnswerFormat, in_reasoning: bool) -> Reading[None]:
    if "harmony" in (format.tool_parser, format.reasoning_parser):
        yield from read_harmony(source, output, has_calls=format.tool_parser == "harmony")
        return
    tags = TAGS.get(format.reasoning_parser or "")
    if tags is not None:
        yield from read_reasoning(source, output, tags, is_open=in_reasoning)
    if format.tool_parser == "llama3":
        yield from read_llama3(source, output, format.tool_names)
    else:
        yield from _CALLS.get(format.tool_parser or "", _read_content)(source, output)


def _read_content(source: Source, output: Output) -> Reading[None]:
    yield from source.rest(output.content)
