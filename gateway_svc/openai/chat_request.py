"""Body of a request for a chat completion: its fields, and what they mean for the SDK."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

import quire
from gateway_svc.openai.chat_messages import ChatMessage, chat_of
from gateway_svc.openai.fields import MAX_LOGPROBS, GenerationFields
from gateway_svc.openai.tools import ToolChoice, Tools, tool_use_of
from gateway_svc.openai.vllm_fields import VllmChatFields
from gateway_svc.request_fields import Ignored, Items, Unsupported
from gateway_svc.thinking_variables import effort_variables
from gateway_svc.tool_use import ToolUse
from quire.params import GenerateParams
from quire.parsing.answer_format import AnswerFormat

_NAMES = {
    "prompt": "messages",
    "logprobs": "top_logprobs",
    "max_tokens": "max_completion_tokens",
    "template_kwargs": "chat_template_kwargs",
}
_EARLIER_NAMES = {"max_tokens": "max_tokens"}


class ChatRequest(GenerationFields, VllmChatFields):
    """The body of a request for a chat completion."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, description="Default: the rest of the context.")
    max_tokens: int | None = Field(None, ge=1, description="Earlier name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    modalities: Items[Literal["text"]] | None = None
    add_generation_prompt: bool | None = Field(None, description="Default: unless continue_final_message is true.")
    continue_final_message: bool | None = Field(None, description="Continue the last message's content.")
    metadata: Ignored
    store: Ignored
    service_tier: Ignored
    safety_identifier: Ignored
    prompt_cache_retention: Ignored
    prompt_cache_options: Ignored
    cache_control: Ignored
    tools: Tools | None = None
    tool_choice: ToolChoice | None = Field(None, description="Default: auto.")
    parallel_tool_calls: bool | None = Field(None, description="False: only the first call comes back.")
    include_reasoning: bool | None = Field(None, description="False: reasoning does not come back.")
    reasoning_effort: str | None = Field(None, description="For the chat template; none: no thinking.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    documents: Items[dict[str, Any]] | None = Field(None, description="For the chat template.")
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
        earlier = {} if self.max_tokens is None or self.max_completion_tokens is not None else _EARLIER_NAMES
        return {**super().names, **_NAMES, **earlier, **self.tool_use.names}

    @property
    def tool_use(self) -> ToolUse:
        """Rules for calls."""
        return tool_use_of(self.tools or (), self.tool_choice, parallel=self.parallel_tool_calls)

    def chat(self, format: AnswerFormat) -> quire.Chat:
        """The conversation for the SDK; `format` is the model's."""
        given = {} if self.documents is None else {"documents": self.documents}
        return chat_of(
            self.messages,
            self.tool_use.offered,
            given | effort_variables(self.reasoning_effort) | (self.chat_template_kwargs or {}),
            format=format,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
        )

    def keywords(self, request_id: str) -> GenerateParams:
        """Keywords for the SDK. Raises ApiError for fields that contradict each other."""
        self.tool_use.check(has_structure=self.structured_outputs is not None)
        given = self.params(request_id)
        bound = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if bound is not None:
            given["max_tokens"] = bound
        given["token_ids"] = bool(self.return_token_ids)
        if self.best_of is not None:
            given["best_of"] = self.best_of
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given
