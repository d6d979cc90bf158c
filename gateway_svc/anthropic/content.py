"""Content blocks of an answer, made of its deltas in their order, and the events that tell them.

A whole message and a streamed one have the same blocks. Knows no message, and no bytes of an event.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

import quire
from gateway_svc.anthropic.thinking import omitting_signature, signature_of
from gateway_svc.anthropic.tools import tool_use_id
from quire.parsing.deltas import Delta

Event = dict[str, Any]
_INVALID = "INVALID_JSON"


@dataclass(slots=True)
class _Text:
    """Text of the answer."""

    pieces: list[str] = field(default_factory=list)

    @property
    def begun(self) -> dict[str, Any]:
        return {"type": "text", "text": ""}

    def delta(self, text: str) -> dict[str, Any] | None:
        return {"type": "text_delta", "text": text}

    @property
    def last_delta(self) -> dict[str, Any] | None:
        return None

    @property
    def made(self) -> dict[str, Any]:
        return {"type": "text", "text": "".join(self.pieces)}


@dataclass(slots=True)
class _Thinking:
    """Reasoning before the answer."""

    pieces: list[str] = field(default_factory=list)

    @property
    def begun(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def delta(self, text: str) -> dict[str, Any] | None:
        return {"type": "thinking_delta", "thinking": text}

    @property
    def last_delta(self) -> dict[str, Any] | None:
        return {"type": "signature_delta", "signature": signature_of("".join(self.pieces))}

    @property
    def made(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        return {"type": "thinking", "thinking": text, "signature": signature_of(text)}


class _OmittedThinking(_Thinking):
    """Reasoning of which only the signature comes back, which has it."""

    def delta(self, text: str) -> dict[str, Any] | None:
        return None

    @property
    def last_delta(self) -> dict[str, Any] | None:
        return {"type": "signature_delta", "signature": omitting_signature("".join(self.pieces))}

    @property
    def made(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": "", "signature": omitting_signature("".join(self.pieces))}


@dataclass(slots=True)
class _ToolUse:
    """A call of a tool, whose input comes as text and is an object in the end."""

    call: quire.ToolCallBegun
    pieces: list[str] = field(default_factory=list)

    @property
    def begun(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": tool_use_id(self.call.id), "name": self.call.name, "input": {}}

    def delta(self, text: str) -> dict[str, Any] | None:
        return {"type": "input_json_delta", "partial_json": text}

    @property
    def last_delta(self) -> dict[str, Any] | None:
        return None

    @property
    def made(self) -> dict[str, Any]:
        return {**self.begun, "input": input_of("".join(self.pieces))}


class MessageContent:
    """Content of one answer so far. Call `add` with its deltas, and `end`; both return the events of what is new."""

    def __init__(self, *, may_call_several: bool, has_thinking: bool, omits_thinking: bool) -> None:
        """Begin without blocks.

        Args:
            may_call_several: more than the first call comes back.
            has_thinking: reasoning comes back.
            omits_thinking: of reasoning only the signature comes back.
        """
        self._last_call: _ToolUse | None = None
        self._may_call_several = may_call_several
        self._has_thinking = has_thinking
        self._thinking = _OmittedThinking if omits_thinking else _Thinking
        self._blocks: list[_Text | _Thinking | _ToolUse] = []

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """The whole blocks, as a message has them."""
        return [each.made for each in self._blocks]

    @property
    def last_arguments(self) -> str | None:
        """Text of the input of the last call that comes back, as far as it goes; None: there are no calls."""
        return None if self._last_call is None else "".join(self._last_call.pieces)

    def add(self, deltas: Iterable[Delta]) -> list[Event]:
        """Add deltas."""
        events: list[Event] = []
        for each in deltas:
            match each:
                case quire.ContentDelta(text):
                    events += self._append(_Text, text)
                case quire.ReasoningDelta(text) if self._has_thinking:
                    events += self._append(self._thinking, text)
                case quire.ToolCallBegun(index) if self._comes_back(index):
                    self._last_call = _ToolUse(each)
                    events += self._begin(self._last_call)
                case quire.ArgumentsDelta(index, text) if self._comes_back(index):
                    events += self._extend(text)
        return events

    @property
    def is_in_text(self) -> bool:
        """True if the last block is text of the answer, which goes on with more of it."""
        return bool(self._blocks) and isinstance(self._blocks[-1], _Text)

    def add_text(self, text: str) -> int:
        """Add text to the last block, which is text. Returns the block's number: the event is `text_delta` of both."""
        self._blocks[-1].pieces.append(text)
        return len(self._blocks) - 1

    def end(self) -> list[Event]:
        """End the last block, behind the last delta."""
        return list(self._end_block())

    def _append(self, kind: type[_Text | _Thinking], text: str) -> Iterator[Event]:
        """Add text to the last block, or to a new one if that is of another kind."""
        if not self._blocks or not isinstance(self._blocks[-1], kind):
            yield from self._begin(kind())
        yield from self._extend(text)

    def _extend(self, text: str) -> Iterator[Event]:
        """Add text to the last block."""
        self._blocks[-1].pieces.append(text)
        if delta := self._blocks[-1].delta(text):
            yield self._event("delta", delta=delta)

    def _begin(self, block: _Text | _Thinking | _ToolUse) -> Iterator[Event]:
        yield from self._end_block()
        self._blocks.append(block)
        yield self._event("start", content_block=block.begun)

    def _end_block(self) -> Iterator[Event]:
        if self._blocks:
            if delta := self._blocks[-1].last_delta:
                yield self._event("delta", delta=delta)
            yield self._event("stop")

    def _event(self, kind: str, **fields: Any) -> Event:
        return _block_event(len(self._blocks) - 1, kind, **fields)

    def _comes_back(self, index: int) -> bool:
        return index == 0 or self._may_call_several


def text_delta(block: int, text: str) -> Event:
    """The event of more text of a block."""
    return _block_event(block, "delta", delta=_Text().delta(text))


def _block_event(block: int, kind: str, **fields: Any) -> Event:
    return {"type": f"content_block_{kind}", "index": block, **fields}


def input_of(arguments: str) -> dict[str, Any]:
    """Input of a call: the object that its arguments are, as far as they go, as Anthropic's client reads a stream.

    Arguments that are no object are the only member of one, under the key that Anthropic's documents propose for them.
    """
    if not arguments:
        return {}
    try:
        found = from_json(arguments, allow_partial=True, allow_inf_nan=False)
        json.dumps(found, allow_nan=False)  # a number may be too large for a float
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {_INVALID: arguments}


def to_json(made: dict[str, Any]) -> bytes:
    """JSON of an object with inputs of calls, whose integers may be of any size."""
    return json.dumps(made, ensure_ascii=False, separators=(",", ":")).encode()
