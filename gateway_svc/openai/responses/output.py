"""Output of a response, and the items that it makes: reasoning, text and calls, in the order in which they came.

A function of the output's text, its tokens and the response's annotation; knows no events.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import quire
from gateway_svc.openai.logprobs import chat_logprobs
from gateway_svc.openai.responses.annotation import ID_PREFIX, Annotation
from gateway_svc.vocabulary import Vocabulary
from quire.parsing.answer_parser import AnswerParser
from quire.parsing.deltas import Delta

ItemKind = Literal["message", "reasoning", "function_call"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
_ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


@dataclass(slots=True)
class OutputItem:
    """An item so far."""

    id: str
    index: int
    kind: ItemKind
    call: quire.ToolCallBegun | None = None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of a message

    @property
    def text(self) -> str:
        """Text of the item, or the arguments of a call."""
        return "".join(self.pieces)

    @property
    def part(self) -> dict[str, Any]:
        """The only part of its content."""
        return content_part(self.kind, self.text, self.logprobs)

    @property
    def name(self) -> str:
        """Name of the function that a call calls."""
        return self.call.name if self.call is not None else ""

    def begun(self) -> dict[str, Any]:
        """The item as it begins."""
        return self._made("in_progress", "", [])

    def made(self, status: ItemStatus) -> dict[str, Any]:
        """The item as it is."""
        return self._made(status, self.text, [self.part])

    def _made(self, status: ItemStatus, text: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"type": self.kind, "id": self.id, "status": status}
        match self.kind, self.call:
            case "function_call", quire.ToolCallBegun() as call:
                return {**head, "call_id": call.id, "name": call.name, "arguments": text}
            case "reasoning", _:
                return {**head, "summary": [], "content": parts}
            case _:
                return {**head, "role": "assistant", "content": parts}


@dataclass(frozen=True, slots=True)
class Addition:
    """The next of an item."""

    item: OutputItem
    text: str = ""
    logprobs: Sequence[dict[str, Any]] = ()


class Output:
    """Output so far, from the beginning on, as its tokens are added."""

    def __init__(self, response_id: str, annotation: Annotation, vocabulary: Vocabulary, *, in_reasoning: bool) -> None:
        self._stem = response_id.removeprefix(ID_PREFIX)
        self._annotation = annotation
        self._vocabulary = vocabulary
        format = annotation.answer_format
        self._parser = None if format.is_plain else AnswerParser(format, response_id, in_reasoning=in_reasoning)
        self.items: list[OutputItem] = []
        self._held: list[dict[str, Any]] = []  # log-probabilities of tokens since the last addition
        self.num_tokens = 0
        self.finish: quire.Finish | None = None

    def add(self, token: quire.Chunk) -> list[Addition]:
        """Add a chunk of at most one token, whose log-probabilities name known tokens. Returns what it adds.

        Log-probabilities are those of a message's tokens. They come with its text, which may be held back until it is
        known that no call begins.
        """
        self.finish = token.finish
        additions = self.add_text(token.text, token.num_tokens)
        if token.logprobs and (additions or self._message is not None):
            self._held += chat_logprobs(token.logprobs, self._annotation.top_logprobs, self._vocabulary)
        return self._with_logprobs(additions) if additions else []

    def add_text(self, text: str, num_tokens: int) -> list[Addition]:
        """Add text of some tokens, without log-probabilities."""
        self.num_tokens += num_tokens
        if self._parser is not None:
            return self._add(self._parser.push(text))
        if not self.num_tokens:
            return []
        return [self._append("message", text)]

    def end(self) -> list[Addition]:
        """Add what was held back, after the last text. Call it once."""
        additions = [] if self._parser is None else self._add(self._parser.end())
        if not additions and self._held and self._message is not None:
            additions = [Addition(self._message)]
        return self._with_logprobs(additions)

    @property
    def _message(self) -> OutputItem | None:
        """The last item, if it is a message."""
        return self.items[-1] if self.items and self.items[-1].kind == "message" else None

    def _with_logprobs(self, additions: list[Addition]) -> list[Addition]:
        """Give the last addition what is held, if it is a message's; else it was of something else."""
        held, self._held = self._held, []
        if not held or self._message is None:
            return additions
        self._message.logprobs += held
        return [*additions[:-1], replace(additions[-1], logprobs=held)]

    def _add(self, deltas: Sequence[Delta]) -> list[Addition]:
        additions = []
        for each in deltas:
            match each:
                case quire.ContentDelta(text):
                    additions.append(self._append("message", text))
                case quire.ReasoningDelta(text):
                    additions.append(self._append("reasoning", text))
                case quire.ToolCallBegun(index) if self._comes_back(index):
                    additions.append(Addition(self._begin("function_call", each)))
                case quire.ArgumentsDelta(index, text) if self._comes_back(index):
                    additions.append(self._append("function_call", text))
        return additions

    def _append(self, kind: ItemKind, text: str) -> Addition:
        """Add to the last item, or to the next one if it is of another kind."""
        item = self.items[-1] if self.items and self.items[-1].kind == kind else self._begin(kind)
        item.pieces.append(text)
        return Addition(item, text)

    def _begin(self, kind: ItemKind, call: quire.ToolCallBegun | None = None) -> OutputItem:
        index = len(self.items)
        item_id = f"{_ID_PREFIXES[kind]}{self._stem}" + (f"_{index}" if index else "")
        self.items.append(OutputItem(item_id, index, kind, call))
        return self.items[-1]

    def _comes_back(self, index: int) -> bool:
        return self._annotation.max_calls is None or index < self._annotation.max_calls


def content_part(kind: ItemKind, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The part of a message or of reasoning."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
