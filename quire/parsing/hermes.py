"""Calls as Hermes and Qwen write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one or several."""

from quire.parsing.calls import content_until, read_call_object, read_call_or_content
from quire.parsing.json_reading import skip_space
from quire.parsing.output import Output
from quire.parsing.source import Markers, Reading, Source

BEGIN, END = "<tool_call>", "</tool_call>"

_DROPPED = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_MARKERS = Markers(BEGIN, *_DROPPED)


def read_hermes(source: Source, output: Output) -> Reading[None]:
    """Read content and calls to the end."""
    while marker := (yield from content_until(source, output, _MARKERS, frozenset(_DROPPED))):
        yield from read_call_or_content(source, output, marker, _read_call)


def _read_call(source: Source, output: Output) -> Reading[None]:
    yield from skip_space(source)
    yield from read_call_object(source, output)
    source.begin_try()
    yield from skip_space(source)
    yield from source.expect(END)
