"""Turns of a conversation that input items stand for.

A chat template knows one turn of the assistant with reasoning, text and calls, where this API has items of their own.
"""

from collections.abc import Iterable
from dataclasses import replace

import quire
from gateway_svc.openai.chat_messages import template_role
from gateway_svc.openai.responses.items import (
    InputCall,
    InputCallOutput,
    InputCompaction,
    InputItem,
    InputMessage,
    InputReasoning,
)

_SUMMARY = "Summary of the conversation so far:\n"


def turns_of(items: Iterable[InputItem]) -> list[quire.ChatMessage]:
    """The turns of some items, in their order."""
    turns: list[quire.ChatMessage] = []
    for item in items:
        last = turns[-1] if turns else None
        joined = None if last is None else _joined(last, item)
        if joined is None:
            turns.append(_turn(item))
        else:
            turns[-1] = joined
    return turns


def _joined(last: quire.ChatMessage, item: InputItem) -> quire.ChatMessage | None:
    """The last turn with an item that belongs to it; None if it begins a turn.

    Text behind calls is of their turn, as in the answer that it comes from: the calls' outputs come behind it. Behind a
    summary the user's words are of the same turn: templates may not take two.
    """
    match last.role, item:
        case "assistant", InputCall():
            return replace(last, tool_calls=[*last.tool_calls, _call(item)])
        case "assistant", InputMessage(role="assistant") if last.tool_calls or not last.content:
            return replace(last, content=last.content + item.text)
        case "user", InputMessage(role="user") if last.content.startswith(_SUMMARY):
            return replace(last, content=f"{last.content}\n\n{item.text}")
        case _:
            return None


def _turn(item: InputItem) -> quire.ChatMessage:
    match item:
        case InputMessage():
            return quire.ChatMessage(template_role(item.role), item.text)
        case InputReasoning():
            return quire.ChatMessage("assistant", reasoning=item.text)
        case InputCall():
            return quire.ChatMessage("assistant", tool_calls=[_call(item)])
        case InputCallOutput():
            return quire.ChatMessage("tool", item.text, tool_call_id=item.call_id, name=item.name or "")
        case InputCompaction():
            return quire.ChatMessage("user", _SUMMARY + item.text)


def _call(item: InputCall) -> quire.ToolCall:
    return quire.ToolCall(item.call_id, item.name, item.arguments)
