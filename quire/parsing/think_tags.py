"""Reasoning between tags at the beginning of an answer, as Qwen, DeepSeek and Mistral write it."""

from quire.parsing.json_reading import skip_space
from quire.parsing.output import Output
from quire.parsing.source import Markers, MismatchError, Reading, Source

THINK = ("<think>", "</think>")
MISTRAL_THINK = ("[THINK]", "[/THINK]")
TAGS = {"think": THINK, "mistral": MISTRAL_THINK}  # by parser
OPENING_TAGS = tuple(opening for opening, _ in TAGS.values())


def read_reasoning(source: Source, output: Output, tags: tuple[str, str], *, is_open: bool) -> Reading[None]:
    """Read reasoning that the prompt has opened, or that the answer begins with; without either read nothing."""
    opening, closing = tags
    source.begin_try()
    try:
        yield from skip_space(source)
        yield from source.expect(opening)  # after an open one, too: a model may repeat it
        source.keep_reading()
    except MismatchError:
        source.go_back()
        if not is_open:
            return
    output.begin_reasoning()
    yield from source.until(Markers(closing), output.reasoning)
    output.end_reasoning()
