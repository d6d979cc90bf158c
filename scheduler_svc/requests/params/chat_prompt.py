"""A chat as its template gets it, from the wire, and its tokens. Knows the message and no template."""

from typing import Any

from quire.v1 import inference_pb2 as pb
from scheduler_svc.text.tokenizer import ModelTokenizer


def encode_chat(tokenizer: ModelTokenizer, chat: pb.ChatPrompt) -> list[int]:
    """Token ids of a conversation. Raises the errors of `ModelTokenizer.encode_chat`."""
    opens_answer = not chat.continue_final_message
    if chat.HasField("add_generation_prompt"):
        opens_answer = chat.add_generation_prompt
    return tokenizer.encode_chat(
        messages_of(chat),
        opens_answer,
        chat.continue_final_message,
        tools=chat.tools,
        template_kwargs=chat.template_kwargs,
    )


def messages_of(chat: pb.ChatPrompt) -> list[dict[str, Any]]:
    """Messages with the keys that they need, as `transformers` gives them: templates ask whether there is a key.

    Arguments of calls are the text of JSON here; the template's process reads them.
    """
    return [_message(each) for each in chat.messages]


def num_chars_of(chat: pb.ChatPrompt) -> int:
    """Characters of all texts of a chat."""
    in_messages = (
        len(text)
        for message in chat.messages
        for text in (message.role, message.content, message.name, message.tool_call_id, message.reasoning)
    )
    in_calls = (
        len(call.id) + len(call.name) + len(call.arguments) for message in chat.messages for call in message.tool_calls
    )
    return sum(in_messages) + sum(in_calls) + len(chat.tools) + len(chat.template_kwargs)


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"thinking": message.reasoning} if message.reasoning else {}
    made |= {"role": message.role, "content": message.content}
    if message.name:
        made["name"] = message.name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [_call(each) for each in message.tool_calls]
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    return made


def _call(call: pb.ToolCall) -> dict[str, Any]:
    named = {"id": call.id} if call.id else {}
    return {**named, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
