"""Turns of a conversation that messages of content blocks stand for.

A chat template knows one turn of the assistant with reasoning, text and calls, and one turn for each result of a tool,
where this API has blocks in messages of two speakers. Texts of one turn become lines of it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import quire
from gateway_svc.anthropic.blocks import (
    Block,
    Content,
    RedactedThinkingBlock,
    TextBlock,
    TextContent,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from gateway_svc.anthropic.thinking import omitted_reasoning
from gateway_svc.api_error import invalid
from gateway_svc.request_fields import ApiModel

_OF_ROLE = {
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_use": "assistant",
    "tool_result": "user",
}


class InputMessage(ApiModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


@dataclass(slots=True)
class _Turn:
    """A turn so far."""

    role: str
    tool_call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[quire.ToolCall] = field(default_factory=list)

    def made(self) -> quire.ChatMessage:
        """The turn for the SDK."""
        return quire.ChatMessage(
            self.role,
            "\n".join(self.texts),
            tool_calls=self.calls,
            tool_call_id=self.tool_call_id,
            name=self.name,
            reasoning="\n".join(self.reasoning),
        )


def turns_of(
    system: TextContent | None, messages: Sequence[InputMessage], call_id: Callable[[str], str]
) -> list[quire.ChatMessage]:
    """The turns of messages behind those of the system; messages of one role in a row are one.

    `call_id` makes the id of a call, for the template, of the id of its `tool_use`. Raises ApiError for a block that
    its role does not have, and for the result of a call that was not made.
    """
    turns = _Turns(call_id)
    for text in system or ():
        turns.add("system", text, "system")
    for i, message in enumerate(messages):
        for j, block in enumerate(message.content):
            turns.add(message.role, block, f"messages[{i}].content[{j}]")
    return [each.made() for each in turns.made]


def is_continued(messages: Sequence[InputMessage]) -> bool:
    """True if the answer continues the last message: it is the assistant's, and has content.

    An assistant's last message without content, as an answer that was cut off at once has it, has nothing to continue.
    Raises ApiError if there is content that does not end with text.
    """
    last = messages[-1]
    if last.role != "assistant" or not last.content:
        return False
    if not isinstance(last.content[-1], TextBlock):
        where = f"messages[{len(messages) - 1}].content"
        raise invalid(where, "the last message ends with no text to continue: send the results of its calls")
    return True


class _Turns:
    """Turns of the blocks so far."""

    def __init__(self, call_id: Callable[[str], str]) -> None:
        self.made: list[_Turn] = []
        self._call_id = call_id
        self._names: dict[str, str] = {}  # of the tools that were used, by id of the use

    def add(self, role: str, block: Block, where: str) -> None:
        """Add a block, whose path in the request is `where`."""
        if _OF_ROLE.get(block.type, role) != role:
            raise invalid(f"{where}.type", f"a block of type {block.type} belongs to the {_OF_ROLE[block.type]}")
        match block:
            case TextBlock():
                self._turn(role).texts.append(block.text)
            case ThinkingBlock():
                if reasoning := block.thinking or omitted_reasoning(block.signature or ""):
                    self._turn(role).reasoning.append(reasoning)
            case RedactedThinkingBlock():
                pass  # not readable here
            case ToolUseBlock():
                self._names[block.id] = block.name
                call = quire.ToolCall(self._call_id(block.id), block.name, json.dumps(block.input, ensure_ascii=False))
                self._turn(role).calls.append(call)
            case ToolResultBlock():
                self._add_result(block, where)

    def _turn(self, role: str) -> _Turn:
        """The last turn if it is of this role, else a new one."""
        if not self.made or self.made[-1].role != role:
            self.made.append(_Turn(role))
        return self.made[-1]

    def _add_result(self, block: ToolResultBlock, where: str) -> None:
        if block.tool_use_id not in self._names:
            raise invalid(f"{where}.tool_use_id", "no tool_use before it has this id")
        name = self._names[block.tool_use_id]
        self.made.append(_Turn("tool", self._call_id(block.tool_use_id), name, [_text_of(block)]))


def _text_of(result: ToolResultBlock) -> str:
    """Text of a result, which says that it is an error if it is one."""
    text = "\n".join(each.text for each in result.content or ())
    if result.is_error and not text.lower().startswith("error"):
        return f"Error: {text}" if text else "Error"
    return text
