"""Fields of Anthropic's Messages API, and their meaning for the SDK. Those of every API are fields here, too."""

from collections.abc import Mapping
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.functional_validators import BeforeValidator
from pydantic_core import PydanticCustomError

import quire
from gateway_svc.api_error import invalid
from gateway_svc.request_fields import FIELD_NAMES, ApiModel, Ignored, RequestFields, Unsupported
from quire.params import GenerateParams

# Names of fields by the SDK's keywords, where they differ.
NAMES = {**FIELD_NAMES, "prompt": "messages", "stop": "stop_sequences"}
_FORMAT_NAMES = {"structured_output": "output_config.format", "json_schema": "output_config.format.schema"}


def _text_alone(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "text":
        reason = "this server does not support content of type {kind}; send text"
        raise PydanticCustomError("unsupported", reason, {"kind": repr(kind[:40])})
    return kind


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class TextBlock(ApiModel):
    """A piece of text."""

    type: Annotated[Literal["text"], BeforeValidator(_text_alone)]
    text: str
    cache_control: Ignored
    citations: Unsupported


Content = Annotated[list[TextBlock], BeforeValidator(_as_blocks, str | list[TextBlock])]


class InputMessage(ApiModel):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class NoThinking(ApiModel):
    """The one way of thinking that is supported: none."""

    type: Literal["disabled"]


class OutputFormat(ApiModel):
    """The format of the text: JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ApiModel):
    """Demands on the output."""

    effort: Ignored
    format: OutputFormat | None = None


class Conversation(ApiModel):
    """The input of a message, whose tokens can be counted."""

    model: str | None = Field(None, description="Name of the served model, if given.")
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: Content | None = None
    thinking: NoThinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Ignored
    speed: Ignored
    context_management: Unsupported
    mcp_servers: Unsupported
    output_format: Unsupported
    tool_choice: Unsupported
    tools: Unsupported

    @property
    def turns(self) -> list[quire.ChatMessage]:
        """The conversation for the chat template: messages of one role in a row are one, and blocks are lines."""
        given = [(each.role, block.text) for each in self.messages for block in each.content]
        system = [("system", block.text) for block in self.system or ()]
        return [
            quire.ChatMessage(role, "\n".join(text for _, text in texts))
            for role, texts in groupby([*system, *given], key=lambda turn: turn[0])
        ]

    @property
    def is_prefilled(self) -> bool:
        """True if the last message is the beginning of the answer."""
        return self.messages[-1].role == "assistant"


class MessageRequest(RequestFields, Conversation):
    """The body of a request for a message."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    metadata: Ignored
    service_tier: Ignored
    container: Unsupported
    diagnostics: Unsupported
    inference_geo: Unsupported

    @property
    def names(self) -> Mapping[str, str]:
        """See RequestFields."""
        return NAMES if self._format is None else {**NAMES, **_FORMAT_NAMES}

    def keywords(self, request_id: str) -> GenerateParams:
        """Keywords for the SDK. Raises ApiError for fields that contradict each other."""
        given = self.params(request_id)
        given["max_tokens"] = self.max_tokens
        given["token_ids"] = False
        if self.stop_sequences:
            given["stop"] = self.stop_sequences
        if self._format is not None:
            if self.structured_outputs is not None:
                raise invalid("structured_outputs", "leave it out where output_config has a format")
            given["json_schema"] = self._format.schema_
        return given

    @property
    def _format(self) -> OutputFormat | None:
        return self.output_config.format if self.output_config is not None else None
