"""Calls as DeepSeek's models write them, between marks of calls: `function`, a separator, the name and a block of JSON
(V3, R1), or the name, a separator and JSON (V3.1).
"""

import re

from quire.parsing.calls import begin_call, content_until, read_call_or_content
from quire.parsing.json_reading import read_value, skip_space
from quire.parsing.output import Output
from quire.parsing.source import Markers, MismatchError, Reading, Source

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

_DROPPED = (CALLS_BEGIN, CALLS_END, "<｜end▁of▁sentence｜>")
_MARKERS = Markers(CALL_BEGIN, *_DROPPED)
_SEPARATOR = Markers(SEPARATOR)
_LINE = re.compile(r"[^\n]*")
_FENCE = "```"


def read_deepseek(source: Source, output: Output) -> Reading[None]:
    """Read content and calls to the end."""
    while marker := (yield from content_until(source, output, _MARKERS, frozenset(_DROPPED))):
        yield from read_call_or_content(source, output, marker, _read_call)


def _read_call(source: Source, output: Output) -> Reading[None]:
    name, _ = yield from source.collect_until(_SEPARATOR)
    if (yield from source.ahead(1)) != "{":  # what stood before it was the kind of tool
        name = yield from source.collect(_LINE)
        yield from skip_space(source)
        yield from source.expect(f"{_FENCE}json")
        yield from skip_space(source)
        if (yield from source.ahead(1)) != "{":
            raise MismatchError
    begin_call(source, output, name.strip())
    yield from read_value(source, output.arguments)
    source.begin_try()
    yield from skip_space(source)
    if (yield from source.take(_FENCE)):
        yield from skip_space(source)
    yield from source.expect(CALL_END)
