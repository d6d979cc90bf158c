"""Pieces of a parsed answer, in the order in which its text came, and the message that they add up to."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """The next text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegun:
    """The beginning of a call. Calls of an answer are numbered from 0; each begins after the one before it."""

    index: int
    id: str  # the same whenever the same answer is parsed
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The next text of a call's arguments, which is JSON unless the model erred or was cut off."""

    index: int  # of the call, the last that has begun
    text: str


Delta = ContentDelta | ReasoningDelta | ToolCallBegun | ArgumentsDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the model."""

    id: str
    name: str
    arguments: str  # JSON, as the model wrote it


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """A whole answer, or its beginning."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def parsed_answer(deltas: Iterable[Delta]) -> ParsedAnswer:
    """The answer of which these are the first deltas."""
    content, reasoning = [], []
    begun: list[ToolCallBegun] = []
    arguments: list[list[str]] = []
    for each in deltas:
        match each:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallBegun():
                begun.append(each)
                arguments.append([])
            case ArgumentsDelta(_, text):
                arguments[-1].append(text)
    calls = tuple(ToolCall(each.id, each.name, "".join(texts)) for each, texts in zip(begun, arguments, strict=True))
    return ParsedAnswer(content="".join(content), reasoning="".join(reasoning), tool_calls=calls)
