"""Format in which a model writes tool calls and reasoning, found in its chat template and its vocabulary.

A template has to write earlier calls in the format that the model writes. Knows the markers of formats and parses
nothing: clients do.
"""

from collections.abc import Container

from quire.parsing import deepseek, harmony, hermes, llama3, mistral
from quire.parsing.answer_format import AnswerFormat
from quire.parsing.think_tags import MISTRAL_THINK, THINK

# Markers of formats that are not parsed: XML of parameters within hermes' tags.
_OTHERS = ("<function=", "<arg_key>")
# By its first marker that the template has.
_TOOL_PARSERS = {
    f"{harmony.CHANNEL}commentary": "harmony",
    deepseek.CALL_BEGIN: "deepseek",
    mistral.TOOL_CALLS: "mistral",
    hermes.BEGIN: "hermes",
    llama3.PYTHON_TAG: "llama3",
}


def answer_format_of(chat_template: str, vocabulary: Container[str]) -> AnswerFormat:
    """The format of a model with this template (empty for none) and these tokens; None for a parser not known."""
    return AnswerFormat(
        tool_parser=_tool_parser(chat_template, vocabulary),
        reasoning_parser=_reasoning_parser(chat_template, vocabulary),
    )


def _tool_parser(chat_template: str, vocabulary: Container[str]) -> str | None:
    if any(each in chat_template for each in _OTHERS):
        return None
    for marker, name in _TOOL_PARSERS.items():
        if marker in chat_template:
            return name
    # LLaMA 3.2's template writes calls without the tag.
    return "llama3" if llama3.PYTHON_TAG in vocabulary and "tool_calls" in chat_template else None


def _reasoning_parser(chat_template: str, vocabulary: Container[str]) -> str | None:
    if f"{harmony.CHANNEL}analysis" in chat_template:
        return "harmony"
    for name, tags in (("mistral", MISTRAL_THINK), ("think", THINK)):
        if any(each in chat_template for each in tags) or all(each in vocabulary for each in tags):
            return name
    return None
