"""Calls as LLaMA 3 writes them: an answer that is `{"name": …, "parameters": {…}}`, or one behind `<|python_tag|>`.

Several have a semicolon between them. Without the marker only what names a tool is a call: an answer may be other JSON.
"""

from collections.abc import Container
from functools import partial

from quire.parsing.calls import content_until, read_call_object, read_call_or_content
from quire.parsing.json_reading import skip_space
from quire.parsing.output import Output
from quire.parsing.source import Markers, Reading, Source

PYTHON_TAG = "<|python_tag|>"

_DROPPED = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_MARKERS = Markers(PYTHON_TAG, *_DROPPED)


def read_llama3(source: Source, output: Output, names: Container[str] | None) -> Reading[None]:
    """Read content and calls to the end; `names` are those of tools, None: any name is one."""
    yield from read_call_or_content(source, output, "", partial(_read_calls, names=names))
    while marker := (yield from content_until(source, output, _MARKERS, frozenset(_DROPPED))):
        yield from read_call_or_content(source, output, marker, partial(_read_calls, names=None))


def _read_calls(source: Source, output: Output, names: Container[str] | None) -> Reading[None]:
    while True:
        yield from skip_space(source)
        yield from read_call_object(source, output, needs_arguments=True, names=names)
        source.begin_try()
        yield from skip_space(source)
        yield from source.expect(";")
