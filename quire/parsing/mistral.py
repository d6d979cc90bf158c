"""Calls as Mistral's models write them: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or later, for each call,
`[TOOL_CALLS]name[ARGS]{…}`, where `[CALL_ID]` and an id may stand behind the name.
"""

import re

from quire.parsing.calls import begin_call, content_until, read_call_object, read_call_or_content
from quire.parsing.json_reading import read_value, skip_space
from quire.parsing.output import Output
from quire.parsing.source import Markers, MismatchError, Reading, Source

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_MARKERS = Markers(TOOL_CALLS)
_WORD = re.compile(r"[^\s\[{]*")


def read_mistral(source: Source, output: Output) -> Reading[None]:
    """Read content and calls to the end."""
    while marker := (yield from content_until(source, output, _MARKERS, frozenset())):
        yield from read_call_or_content(source, output, marker, _read_calls)


def _read_calls(source: Source, output: Output) -> Reading[None]:
    yield from skip_space(source)
    if (yield from source.take("[")):
        yield from _read_list(source, output)
    else:
        yield from _read_named(source, output)


def _read_list(source: Source, output: Output) -> Reading[None]:
    while True:
        yield from skip_space(source)
        yield from read_call_object(source, output)
        source.begin_try()
        yield from skip_space(source)
        if (yield from source.first_of((",", "]"))) == "]":
            return


def _read_named(source: Source, output: Output) -> Reading[None]:
    name = yield from source.collect(_WORD)
    if (yield from source.take(CALL_ID)):
        yield from source.run(_WORD)  # ids of ours are the same for a retry
    yield from source.take(ARGS)
    yield from skip_space(source)
    if (yield from source.ahead(1)) != "{":
        raise MismatchError
    begin_call(source, output, name)
    yield from read_value(source, output.arguments)
