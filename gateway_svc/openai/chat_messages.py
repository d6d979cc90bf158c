"""Messages of conversations, in OpenAI's form and with vLLM's fields for reasoning."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

import quire
from common.bounds import MOST_TOOL_CALLS
from gateway_svc.openai.tools import SentCall
from gateway_svc.request_fields import ApiModel, Ignored, Items, Unsupported, by_type
from quire.params import Tools
from quire.parsing.answer_format import AnswerFormat
from quire.parsing.answer_parser import template_call_id


class TextPart(ApiModel):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Ignored
    cache_control: Ignored  # Anthropic's, which clients of several APIs send to all; every prefix is cached


class RefusalPart(ApiModel):
    """Words of a model that declined to answer, in a message of the assistant."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Words of the model."""
        return self.refusal


Part = Annotated[
    Annotated[TextPart, Tag("TextPart")] | Annotated[RefusalPart, Tag("RefusalPart")],
    by_type({"text": "TextPart", "refusal": "RefusalPart"}, "content"),
]


class ChatMessage(ApiModel):
    """A message of a conversation: text, or parts of text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    name: str | None = Field(None, description="For the chat template.")
    tool_calls: Annotated[Items[SentCall], Field(max_length=MOST_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="Reasoning of the assistant, for the chat template.")
    reasoning: str | None = Field(None, description="Other name of reasoning_content.")
    type: Ignored
    refusal: Ignored
    parsed: Ignored  # OpenAI's client adds it to an answer
    annotations: Ignored
    cache_control: Ignored  # as in a part
    provider_specific_fields: Ignored  # LiteLLM adds this and the next to answers
    thinking_blocks: Ignored
    reasoning_details: Ignored  # OpenRouter adds them to answers
    audio: Unsupported
    function_call: Unsupported

    @property
    def text(self) -> str:
        """The text; parts are lines of their own."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())

    def turn(self) -> quire.ChatMessage:
        """The message for the SDK."""
        return quire.ChatMessage(
            template_role(self.role),
            self.text,
            tool_calls=[each.call() for each in self.tool_calls or ()],
            tool_call_id=self.tool_call_id or "",
            name=self.name or "",
            reasoning=self.reasoning_content or self.reasoning or "",
        )


def template_role(role: str) -> str:
    """The role as chat templates know it."""
    return "system" if role == "developer" else role


def templated(turn: quire.ChatMessage, format: AnswerFormat) -> quire.ChatMessage:
    """The turn with ids of calls as the model's templates take them: a conversation may come from another model."""
    if not (turn.tool_calls or turn.tool_call_id):
        return turn
    calls = [replace(each, id=template_call_id(format, each.id)) for each in turn.tool_calls]
    result_of = turn.tool_call_id and template_call_id(format, turn.tool_call_id)
    return replace(turn, tool_calls=calls, tool_call_id=result_of)


def chat_of(
    messages: Sequence[ChatMessage],
    tools: Tools,
    template_kwargs: Mapping[str, Any] | None,
    *,
    format: AnswerFormat,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
) -> quire.Chat:
    """The conversation for the SDK; `format` is the model's."""
    return quire.Chat(
        messages=[templated(each.turn(), format) for each in messages],
        tools=tools,
        template_kwargs=template_kwargs,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
