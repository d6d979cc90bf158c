"""Calls of tools as formats share them: a JSON object with a name and arguments, tried and taken back if it is none."""

from collections.abc import Callable, Container

from quire.parsing.json_reading import read_string, read_value, skip_space, whole_string
from quire.parsing.output import Output
from quire.parsing.source import MAX_HELD_CHARS, Markers, MismatchError, Reading, Source

MAX_NAME_CHARS = 128  # a longer one could not be sent back in a message

_ARGUMENTS = ("arguments", "parameters")


def content_until(source: Source, output: Output, markers: Markers, dropped: frozenset[str]) -> Reading[str]:
    """Read content to the first marker that is not dropped. Returns the marker; empty at the end of the text."""
    while True:
        marker = yield from source.until(markers, output.content)
        if marker not in dropped:
            return marker


def read_call_or_content(
    source: Source, output: Output, marker: str, read: Callable[[Source, Output], Reading[None]]
) -> Reading[None]:
    """Read what follows a marker. If no call begins there, the marker is content, and so is what follows."""
    num_calls = output.num_calls
    if not (yield from tried(source, read(source, output))) and output.num_calls == num_calls:
        output.content(marker)


def tried(source: Source, reading: Reading[None], max_chars: int = MAX_HELD_CHARS) -> Reading[bool]:
    """True if the reading succeeded; after a mismatch the source is where its undecided part began."""
    source.begin_try(max_chars)
    try:
        yield from reading
    except MismatchError:
        source.go_back()
        return False
    source.keep_reading()
    return True


def begin_call(source: Source, output: Output, name: str) -> None:
    """Begin a call, which decides what was tried. Raises MismatchError without a name, or with a long one."""
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise MismatchError
    source.keep_reading()
    output.begin_call(name)


def read_call_object(
    source: Source, output: Output, *, needs_arguments: bool = False, names: Container[str] | None = None
) -> Reading[None]:
    """Read `{"name": …, "arguments": …}`, whose keys may come in any order and with others.

    The call begins at its arguments, or at its name if that comes later; without arguments at the end of the object,
    unless it needs them. Its name is one of `names`; None: any. Raises MismatchError.
    """
    yield from _CallObject(source, output, names).read(needs_arguments=needs_arguments)


class _CallObject:
    """One object while it is read."""

    def __init__(self, source: Source, output: Output, names: Container[str] | None) -> None:
        self._source = source
        self._output = output
        self._names = names
        self._name = ""
        self._early: list[str] = []  # arguments before the name
        self._has_begun = False

    def read(self, *, needs_arguments: bool) -> Reading[None]:
        source = self._source
        separator = yield from source.first_of(("{",))
        while separator != "}":
            yield from skip_space(source)
            key = yield from whole_string(source)
            yield from skip_space(source)
            yield from source.expect(":")
            yield from skip_space(source)
            yield from self._read_member(key)
            yield from skip_space(source)
            separator = yield from source.first_of((",", "}"))
        if not self._has_begun:
            if needs_arguments:
                raise MismatchError
            begin_call(source, self._output, self._name)
            self._output.arguments("{}")

    def _read_member(self, key: str) -> Reading[None]:
        if key == "name" and not self._name:
            self._name = yield from whole_string(self._source)
            if self._names is not None and self._name not in self._names:
                raise MismatchError
            if self._early:
                self._begin("".join(self._early))
        elif key in _ARGUMENTS and self._name and not self._has_begun:
            self._begin("")
            yield from _read_arguments(self._source, self._output.arguments)
        elif key in _ARGUMENTS and not self._early:
            yield from _read_arguments(self._source, self._early.append)
        else:
            yield from read_value(self._source, lambda _: None)
        if self._has_begun:  # the rest of the object is content if it is none
            self._source.begin_try()

    def _begin(self, arguments: str) -> None:
        begin_call(self._source, self._output, self._name)
        self._has_begun = True
        self._output.arguments(arguments)


def _read_arguments(source: Source, emit: Callable[[str], None]) -> Reading[None]:
    """Read arguments: a JSON value, or a string that has it as its text."""
    if (yield from source.ahead(1)) == '"':
        yield from read_string(source, emit)
    else:
        yield from read_value(source, emit)
