"""Conversations to protobuf: messages with their calls, tools, and variables of the template."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from quire.params import Chat, ChatMessage, Messages
from quire.parsing.deltas import ToolCall
from quire.v1 import inference_pb2 as pb
from quire.wire_fields import invalid_field, json_field, set_field

_TURN_KEYS = {each.name for each in fields(ChatMessage)}
_CALL_KEYS = {each.name for each in fields(ToolCall)}


def chat_to_pb(chat: Chat | Messages) -> pb.ChatPrompt:
    """Encodes a conversation."""
    if not isinstance(chat, Chat):
        chat = Chat(messages=chat)
    messages, prompt = chat.messages, pb.ChatPrompt()
    for name in ("add_generation_prompt", "continue_final_message"):
        set_field(prompt, "chat.", name, getattr(chat, name))
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError("messages must be a list of messages, each with a role and its content")
    for index, each in enumerate(messages):
        turn = each if isinstance(each, ChatMessage) else _turn(index, each)
        _set_turn(prompt.messages.add(), f"chat.messages[{index}].", turn)
    if chat.tools:
        prompt.tools = json_field("chat.tools", list(chat.tools))
    if chat.template_kwargs:
        prompt.template_kwargs = json_field("chat.template_kwargs", dict(chat.template_kwargs))
    return prompt


def _turn(index: int, message: Mapping[str, Any]) -> ChatMessage:
    """A message of a dict that has the keys of ChatMessage, of which all but role and content may be missing."""
    where = f"chat.messages[{index}]"
    if not isinstance(message, Mapping):
        raise invalid_field(where, f"must be a ChatMessage or a dict, not {type(message).__name__}")
    has_calls = bool(message.get("tool_calls"))
    if not {"role"} | ({"content"} if not has_calls else set()) <= set(message) <= _TURN_KEYS:
        allowed = ", ".join(sorted(_TURN_KEYS - {"role", "content"}))
        raise invalid_field(where, f"needs role and content and, at most, {allowed}; has {sorted(message)}")
    for name, value in message.items():
        if value is None and name != "tool_calls" and not (name == "content" and has_calls):
            raise invalid_field(f"{where}.{name}", "must be a text, not None")
    return ChatMessage(**{**message, "content": message.get("content") or ""})


def _calls(where: str, calls: object) -> list[ToolCall]:
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Iterable):
        raise invalid_field(where, f"must be a list of calls, not {type(calls).__name__}")
    return [_call(f"{where}[{index}]", each) for index, each in enumerate(calls)]


def _call(where: str, call: ToolCall | Mapping[str, str]) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    if not isinstance(call, Mapping) or set(call) != _CALL_KEYS:
        raise invalid_field(where, "must be a ToolCall, or a dict with id, name and arguments")
    return ToolCall(**call)


def _set_turn(target: pb.ChatMessage, path: str, turn: ChatMessage) -> None:
    for name in ("role", "content", "tool_call_id", "name", "reasoning"):
        set_field(target, path, name, getattr(turn, name))
    for index, call in enumerate(_calls(f"{path}tool_calls", turn.tool_calls)):
        made = target.tool_calls.add()
        for name in _CALL_KEYS:
            set_field(made, f"{path}tool_calls[{index}].", name, getattr(call, name))
