"""Answers of gpt-oss in the harmony format: messages with a header, whose channel says what they are.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`: analysis is reasoning; a message
to `functions.x` is a call of x; the others are content.
"""

import re

from quire.parsing.calls import MAX_NAME_CHARS, tried
from quire.parsing.output import Output
from quire.parsing.source import Markers, MismatchError, Reading, Source

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER_CHARS = 512

_AFTER_HEADER = Markers(MESSAGE, START, *ENDS)
_AFTER_BODY = Markers(START, *ENDS)
_RECIPIENT = re.compile(rf"\bto=functions\.([^\s<]{{1,{MAX_NAME_CHARS}}})(?![^\s<])")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")


def read_harmony(source: Source, output: Output, *, has_calls: bool) -> Reading[None]:
    """Read reasoning, content and, unless they are content, calls. The prompt has opened the first header."""
    marker = START
    while marker:
        header: list[str] = []
        if marker == START and (yield from tried(source, _read_header(source, header), MAX_HEADER_CHARS)):
            marker = yield from _read_body(source, output, "".join(header), has_calls=has_calls)
        else:
            marker = yield from source.until(_AFTER_BODY, output.content)


def _read_header(source: Source, header: list[str]) -> Reading[None]:
    """Read the text before the message. Raises MismatchError where there is no header."""
    text, marker = yield from source.collect_until(_AFTER_HEADER)
    if marker != MESSAGE:
        raise MismatchError
    header.append(text)


def _read_body(source: Source, output: Output, header: str, *, has_calls: bool) -> Reading[str]:
    """Read a message. Returns the marker behind it; empty at the end of the text."""
    recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
    if recipient is not None and has_calls:
        output.begin_call(recipient[1])
        return (yield from source.until(_AFTER_BODY, output.arguments))
    if channel is not None and channel[1] == "analysis":
        output.begin_reasoning()
        marker = yield from source.until(_AFTER_BODY, output.reasoning)
        output.end_reasoning()
        return marker
    return (yield from source.until(_AFTER_BODY, output.content))
