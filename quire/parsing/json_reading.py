"""JSON read piece by piece from a source: values as they are spelled, strings as what they say.

Knows no format of calls. A value that the text breaks off is read as far as it goes; only brackets are checked.
"""

import json
import re
from collections.abc import Callable

from quire.parsing.source import MismatchError, Reading, Source

MAX_DEPTH = 256

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\]*')  # within a string
_BETWEEN_BRACKETS = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[-+.\w]*")
_CLOSING = {"{": "}", "[": "]"}
_ESCAPE_CHARS = 6  # \uXXXX
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def skip_space(source: Source) -> Reading[None]:
    """Consume whitespace."""
    yield from source.run(_SPACE)


def read_value(source: Source, emit: Callable[[str], None]) -> Reading[None]:
    """Read a value, which `emit` gets as it is spelled. Raises MismatchError if none is next, or at a wrong bracket."""
    first = yield from source.ahead(1)
    if first in _CLOSING:
        yield from _read_nested(source, emit)
    elif first == '"':
        yield from _read_spelled_string(source, emit)
    elif first and _SCALAR.fullmatch(first):
        yield from source.run(_SCALAR, emit)
    else:
        raise MismatchError


def read_string(source: Source, emit: Callable[[str], None]) -> Reading[bool]:
    """Read a string, of which `emit` gets what it says. False if the text broke off. Raises MismatchError if none."""
    yield from source.expect('"')
    while True:
        yield from source.run(_PLAIN, emit)
        match (yield from source.ahead(1)):
            case "":
                return False
            case '"':
                source.skip(1)
                return True
            case _:
                emit((yield from _read_escape(source)))


def whole_string(source: Source) -> Reading[str]:
    """A string to its end. Raises MismatchError if there is none, or none that ends."""
    pieces: list[str] = []
    if not (yield from read_string(source, pieces.append)):
        raise MismatchError
    return "".join(pieces)


def _read_nested(source: Source, emit: Callable[[str], None]) -> Reading[None]:
    open_brackets: list[str] = []
    while True:
        yield from source.run(_BETWEEN_BRACKETS, emit)
        char = yield from source.ahead(1)
        if not char:
            return
        if char == '"':
            yield from _read_spelled_string(source, emit)
            continue
        if char in _CLOSING:
            open_brackets.append(_CLOSING[char])
            if len(open_brackets) > MAX_DEPTH:
                raise MismatchError
        elif open_brackets.pop() != char:
            raise MismatchError
        source.skip(1)
        emit(char)
        if not open_brackets:
            return


def _read_spelled_string(source: Source, emit: Callable[[str], None]) -> Reading[None]:
    source.skip(1)
    emit('"')
    while True:
        yield from source.run(_PLAIN, emit)
        piece = yield from source.ahead(1)
        if piece == "\\":
            piece = yield from source.ahead(2)
        source.skip(len(piece))
        emit(piece)
        if piece in ("", '"'):
            return


def _read_escape(source: Source) -> Reading[str]:
    """Read what an escape says, or two that are one character; one that JSON does not have, as it is spelled."""
    spelled = yield from source.ahead(2)
    if spelled == "\\u":
        spelled = yield from source.ahead(_ESCAPE_CHARS)
        if spelled[2:4].lower() in ("d8", "d9", "da", "db"):
            both = yield from source.ahead(2 * _ESCAPE_CHARS)
            spelled = both if both[_ESCAPE_CHARS:].startswith("\\u") else spelled
    try:
        said = str(json.loads(f'"{spelled}"'))
    except ValueError:
        spelled = said = spelled[:2]
    source.skip(len(spelled))
    return _LONE_SURROGATE.sub("\ufffd", said)
