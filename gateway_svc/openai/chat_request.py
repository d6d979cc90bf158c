"""Body of a request for a chat completion: its fields, and what they mean for the SDK."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

import quire
from gateway_svc.api_error import invalid
from gateway_svc.openai.chat_messages import ChatMessage, chat_of
from gateway_svc.openai.fields import MAX_LOGPROBS, GenerationFields
from gateway_svc.openai.tools import ToolChoice, Tools, tool_use_of
from gateway_svc.request_fields import FIELD_NAMES, ApiModel, Ignored, Unsupported
from gateway_svc.tool_use import ToolUse
from quire.params import GenerateParams

_NAMES = {
    **FIELD_NAMES,
    "prompt": "messages",
    "logprobs": "top_logprobs",
    "max_tokens": "max_completion_tokens",
    "template_kwargs": "chat_template_kwargs",
}
_FORMAT_NAMES = {
    "structured_output": "response_format",
    "lark": "response_format",
    "json_schema": "response_format.json_schema",
}


class JsonSchema(ApiModel):
    """A schema and its name, which is for the client; `strict` is always on."""

    name: str = Field(max_length=64)
    description: Ignored
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Default: any object.")
    strict: Ignored


class ResponseFormat(ApiModel):
    """The format of an answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def keywords(self) -> GenerateParams:
        """Keywords for the SDK. Raises ApiError if the schema is missing or superfluous."""
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise invalid("response_format.json_schema", "belongs to the type json_schema, and is required there")
        if self.type == "text":
            return {}
        schema = None if self.json_schema is None else self.json_schema.schema_
        return {"json_object": True} if schema is None else {"json_schema": schema}


class ChatRequest(GenerationFields):
    """The body of a request for a chat completion."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, description="Default: the rest of the context.")
    max_tokens: int | None = Field(None, ge=1, description="Earlier name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: bool | None = Field(None, description="Default: unless continue_final_message is true.")
    continue_final_message: bool | None = Field(None, description="Continue the last message's content.")
    metadata: Ignored
    store: Ignored
    service_tier: Ignored
    safety_identifier: Ignored
    prompt_cache_retention: Ignored
    prompt_cache_options: Ignored
    tools: Tools | None = None
    tool_choice: ToolChoice | None = Field(None, description="Default: auto.")
    parallel_tool_calls: bool | None = Field(None, description="False: only the first call comes back.")
    include_reasoning: bool | None = Field(None, description="False: reasoning does not come back.")
    reasoning_effort: str | None = Field(None, description="For the chat template.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    documents: list[dict[str, Any]] | None = Field(None, description="For the chat template.")
    verbosity: Ignored
    audio: Unsupported
    function_call: Unsupported
    functions: Unsupported
    moderation: Unsupported
    prediction: Unsupported
    web_search_options: Unsupported

    @property
    def names(self) -> Mapping[str, str]:
        """See GenerationFields."""
        return {**_NAMES, **({} if self.response_format is None else _FORMAT_NAMES), **self.tool_use.names}

    @property
    def tool_use(self) -> ToolUse:
        """Rules for calls."""
        return tool_use_of(self.tools or (), self.tool_choice, parallel=self.parallel_tool_calls)

    @property
    def chat(self) -> quire.Chat:
        """The conversation for the SDK."""
        named = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        given = {name: value for name, value in named.items() if value is not None}
        return chat_of(
            self.messages,
            self.tool_use.offered,
            given | (self.chat_template_kwargs or {}),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
        )

    def keywords(self, request_id: str) -> GenerateParams:
        """Keywords for the SDK. Raises ApiError for fields that contradict each other."""
        self.tool_use.check(has_form=self.response_format is not None or self.structured_outputs is not None)
        given = self.params(request_id)
        bound = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if bound is not None:
            given["max_tokens"] = bound
        given["token_ids"] = bool(self.return_token_ids)
        if self.best_of is not None:
            given["best_of"] = self.best_of
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        if self.response_format is not None:
            if self.structured_outputs is not None:
                raise invalid("structured_outputs", "leave it out where response_format is given")
            given.update(self.response_format.keywords())
        return given
