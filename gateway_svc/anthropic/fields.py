"""Fields of Anthropic's Messages API, and their meaning for the SDK. Those of every API are fields here, too."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

import quire
from gateway_svc.anthropic.blocks import TextContent
from gateway_svc.anthropic.errors import no_threads
from gateway_svc.anthropic.thinking import Thinking
from gateway_svc.anthropic.tools import ToolChoice, Tools, tool_use_of
from gateway_svc.anthropic.turns import InputMessage, is_continued, turns_of
from gateway_svc.api_error import invalid
from gateway_svc.request_fields import FIELD_NAMES, ApiModel, Ignored, Items, RequestFields, Unsupported
from gateway_svc.thinking_variables import effort_variables
from gateway_svc.tool_use import ToolUse
from quire.params import GenerateParams
from quire.parsing.answer_format import AnswerFormat
from quire.parsing.answer_parser import template_call_id

# Names of fields by the SDK's keywords, where they differ.
NAMES = {
    **FIELD_NAMES,
    "prompt": "messages",
    "stop": "stop_sequences",
    "template_kwargs": "chat_template_kwargs",
}
_FORMAT_NAMES = {
    "structured_output": "output_config.format",
    "lark": "output_config.format",
    "json_schema": "output_config.format.schema",
}


class OutputFormat(ApiModel):
    """The format of the text: JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ApiModel):
    """Demands on the output."""

    effort: str | None = Field(
        None, max_length=64, description="For the chat template, as reasoning_effort; none: no thinking."
    )
    format: OutputFormat | None = None


def _all_alone(keep: Any) -> Any:
    if keep not in ("all", {"type": "all"}):
        raise PydanticCustomError("unsupported", "this server keeps all thinking: give all")
    return keep


def _clear_thinking_alone(kind: Any) -> Any:
    if kind != "clear_thinking_20251015":
        reason = "this server edits no context: give clear_thinking_20251015 that keeps all, or leave it out"
        raise PydanticCustomError("unsupported", reason)
    return kind


class Edit(ApiModel):
    """An edit of the context that changes nothing: thinking is cleared, but for all of it. Claude Code asks for it."""

    type: Annotated[Literal["clear_thinking_20251015"], BeforeValidator(_clear_thinking_alone)]
    keep: Annotated[Any, AfterValidator(_all_alone), WithJsonSchema({"enum": ["all", {"type": "all"}]})]


class ContextManagement(ApiModel):
    """Edits of the context, none of which may change it."""

    edits: Annotated[Items[Edit], Field(max_length=16)] | None = None


class Conversation(ApiModel):
    """The input of a message, whose tokens can be counted."""

    model: str | None = Field(None, description="Name of the served model, if given.")
    messages: Annotated[Items[InputMessage], Field(min_length=1)]
    system: TextContent | None = None
    thinking: Thinking | None = Field(None, description="Default: as the chat template has it.")
    tools: Tools | None = None
    tool_choice: ToolChoice | None = Field(None, description="Default: auto.")
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    cache_control: Ignored
    speed: Ignored
    context_management: ContextManagement | None = Field(None, description="Edits that change nothing are taken.")
    mcp_servers: Unsupported
    output_format: Unsupported
    thread: Any = Field(None, description="Not supported; null is accepted. Anthropic's client goes on without it.")

    @property
    def tool_use(self) -> ToolUse:
        """Rules for calls."""
        return tool_use_of(self.tools or (), self.tool_choice)

    def chat(self, format: AnswerFormat) -> quire.Chat:
        """The conversation for the SDK; `format` is the model's. Raises ApiError for fields that do not fit together.

        It goes on with the last message if that is the assistant's.
        """
        self._check()
        turns = turns_of(self.system, self.messages, lambda call_id: template_call_id(format, call_id))
        return quire.Chat(
            messages=turns,
            tools=self.tool_use.offered,
            template_kwargs=self._variables,
            continue_final_message=is_continued(self.messages),
        )

    @property
    def _variables(self) -> dict[str, Any]:
        """Variables of the chat template; those that are given by their own names win."""
        made = effort_variables(None if self.output_config is None else self.output_config.effort)
        made |= {} if self.thinking is None else self.thinking.variables
        return made | (self.chat_template_kwargs or {})

    def _check(self) -> None:
        if self.thread is not None:
            raise no_threads()
        if self.thinking is not None:
            self.thinking.check()
        if self.tool_choice is not None:
            if not self.tools:
                raise invalid("tool_choice", "give tools as well")
            self.tool_choice.check()


class MessageMetadata(ApiModel):
    """Description of a request's sender."""

    model_config = ConfigDict(extra="ignore")

    user_id: str | None = Field(None, description="As session_key, where that is not given.")


class MessageRequest(RequestFields, Conversation):
    """The body of a request for a message."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Items[str] | None = None
    metadata: MessageMetadata | None = None
    service_tier: Ignored
    container: Unsupported
    diagnostics: Unsupported
    inference_geo: Unsupported

    @property
    def names(self) -> Mapping[str, str]:
        """See RequestFields."""
        return {**NAMES, **({} if self._format is None else _FORMAT_NAMES), **self.tool_use.names}

    @property
    def session(self) -> str | None:
        """See RequestFields."""
        return super().session or (self.metadata and self.metadata.user_id) or None

    def keywords(self, request_id: str) -> GenerateParams:
        """Keywords for the SDK. Raises ApiError for fields that contradict each other."""
        self.tool_use.check(has_structure=self.structured_outputs is not None)
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
