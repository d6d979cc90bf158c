"""Body of a request for a response, and its meaning for the SDK.

The sampling parameters beyond OpenAI's are those of completions.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

import quire
from gateway_svc.api_error import ApiError, invalid
from gateway_svc.openai.fields import MAX_LOGPROBS, GenerationFields, StreamOptions
from gateway_svc.openai.responses.annotation import Annotation
from gateway_svc.openai.responses.items import GivenItem, InputItem
from gateway_svc.openai.responses.tools import Choice, FunctionTools, Reasoning, rules_for_calls
from gateway_svc.request_fields import ApiModel, Ignored, Items, Unsupported, at_most
from gateway_svc.thinking_variables import effort_variables
from gateway_svc.tool_use import ToolUse
from quire.params import GenerateParams, Messages
from quire.parsing.answer_format import AnswerFormat

_LOGPROBS = "message.output_text.logprobs"
_NO_INPUT = "Missing required parameter: 'input', or previous_response_id"
_NAMES = {
    "prompt": "input",
    "messages": "input",
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
    "template_kwargs": "chat_template_kwargs",
}
_FORMAT_NAMES = {"structured_output": "text.format", "lark": "text.format", "json_schema": "text.format.schema"}
_MOST_METADATA = 16
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]
_Name = Annotated[str, Field(max_length=512)]


class TextFormat(ApiModel):
    """The format of the text: plain, any JSON object, or JSON of a schema, which is enforced in any case."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = Field(None, max_length=4096)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def check(self) -> None:
        """Raises ApiError if the schema is missing or superfluous."""
        if (self.schema_ is None) == (self.type == "json_schema"):
            raise invalid("text.format.schema", "belongs to the type json_schema, and is required there")

    @property
    def keywords(self) -> GenerateParams:
        """Keywords for the SDK."""
        if self.schema_ is not None:
            return {"json_schema": self.schema_}
        return {"json_object": True} if self.type == "json_object" else {}

    @property
    def echo(self) -> dict[str, Any]:
        """The format as the response object has it."""
        if self.schema_ is None:
            return {"type": self.type}
        return {
            "type": self.type,
            "name": self.name or "",
            "description": self.description,
            "schema": self.schema_,
            "strict": True,
        }


class TextOptions(ApiModel):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Ignored


class ResponseStreamOptions(StreamOptions):
    """Options of a streamed response, whose last event has the usage in any case."""

    include_usage: bool | None = Field(None, description="Accepted, and without effect.")
    continuous_usage_stats: Unsupported


class ResponseRequest(GenerationFields):
    """The body of a request for a response."""

    input: str | Items[GivenItem] | None = Field(
        None, description="Text, or the items of a conversation; needed without previous_response_id."
    )
    instructions: str | None = Field(None, description="The system's message, before the conversation.")
    previous_response_id: str | None = Field(
        None, max_length=128, description="Stored response whose conversation goes on."
    )
    max_output_tokens: int | None = Field(None, ge=1, description="Default: the rest of the context.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="With include alone.")
    include: (
        Items[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None
    ) = Field(None, description="Only message.output_text.logprobs has an effect.")
    background: bool | None = Field(None, description="Answer at once; the response is retrieved later.")
    store: bool | None = Field(None, description="Keep the response to be retrieved; default: true.")
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: leave out the oldest turns of a conversation that does not fit into the context."
    )
    metadata: Annotated[dict[_Key, _Value], at_most(_MOST_METADATA), Field(max_length=_MOST_METADATA)] | None = None
    prompt_cache_key: _Name | None = Field(None, description="As session_key, where that is not given.")
    user: _Name | None = Field(None, description="As prompt_cache_key, where that is not given.")
    safety_identifier: _Name | None = None
    tools: FunctionTools | None = None
    tool_choice: Choice | None = Field(None, description="Default: auto.")
    parallel_tool_calls: bool | None = Field(None, description="False: only the first call comes back.")
    max_tool_calls: int | None = Field(None, ge=1, le=1 << 31, description="Most calls that come back.")
    reasoning: Reasoning | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")
    client_metadata: Ignored
    prompt_cache_options: Ignored
    prompt_cache_retention: Ignored
    service_tier: Ignored
    access_programs: Unsupported
    background_options: Unsupported
    context_management: Unsupported
    conversation: Unsupported
    image: Unsupported
    moderation: Unsupported
    prompt: Unsupported
    n: Unsupported
    beam_width: Unsupported
    length_penalty: Unsupported
    early_stopping: Unsupported
    prompt_logprobs: Unsupported
    return_token_ids: Unsupported
    return_tokens_as_token_ids: Unsupported
    response_format: Unsupported  # text.format is in its place

    @property
    def names(self) -> Mapping[str, str]:
        """Names of fields by the SDK's keywords, where they differ."""
        return {
            **super().names,
            **_NAMES,
            **({} if self._format is None else _FORMAT_NAMES),
            **self.tool_use.names,
        }

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def tool_use(self) -> ToolUse:
        """Rules for calls."""
        return rules_for_calls(
            self.tools, self.tool_choice, parallel=self.parallel_tool_calls, most=self.max_tool_calls
        )

    @property
    def has_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Raises ApiError for fields that do not go together."""
        if self.input is None and self.previous_response_id is None:
            raise ApiError(400, _NO_INPUT, param="input", code="missing_required_parameter")
        if self.background and not self.is_stored:
            raise invalid("background", "give store: true as well, or the response cannot be retrieved")
        if self.top_logprobs and not self.has_logprobs:
            raise invalid("top_logprobs", f"give include: ['{_LOGPROBS}'] as well")
        self.tool_use.check(has_structure=self.structured_outputs is not None)
        if self._format is not None:
            self._format.check()
            if self.structured_outputs is not None and self._format.keywords:
                raise invalid("structured_outputs", "leave it out where text.format is given")

    @property
    def _format(self) -> TextFormat | None:
        return None if self.text is None else self.text.format

    def annotation(
        self, model: quire.Model, format: AnswerFormat, given: GenerateParams, items: list[InputItem]
    ) -> Annotation:
        """Annotation of the request.

        Args:
            model: that is served.
            format: of the output.
            given: keywords for the SDK.
            items: of the input, resolved.
        """
        defaults, tool_use = model.sampling_defaults, self.tool_use
        choice = self.tool_choice or "auto"
        return Annotation(
            model=model.name,
            store=self.is_stored,
            background=bool(self.background),
            instructions=self.instructions,
            previous_response_id=self.previous_response_id,
            max_output_tokens=self.max_output_tokens,
            temperature=_first(given.get("temperature"), defaults.temperature, 1.0),
            top_p=_first(given.get("top_p"), defaults.top_p, 1.0),
            presence_penalty=given.get("presence_penalty", 0.0),
            frequency_penalty=given.get("frequency_penalty", 0.0),
            top_logprobs=self.top_logprobs or 0,
            has_logprobs=self.has_logprobs,
            truncation=self.truncation or "disabled",
            text={"format": {"type": "text"} if self._format is None else self._format.echo},
            metadata=self.metadata or {},
            user=self.user,
            safety_identifier=self.safety_identifier,
            prompt_cache_key=self.prompt_cache_key,
            tools=[each.echo(is_enforced=tool_use.enforces(each.name)) for each in self.tools or ()],
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            max_tool_calls=self.max_tool_calls,
            reasoning={"effort": None if self.reasoning is None else self.reasoning.effort, "summary": None},
            tool_parser=format.tool_parser,
            reasoning_parser=format.reasoning_parser,
            is_forced=format.is_forced,
            may_call_several=tool_use.may_call_several,
            input=items if self.is_stored else [],
        )

    def chat(self, turns: Messages) -> quire.Chat:
        """The conversation of these turns for the SDK."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return quire.Chat(
            messages=turns,
            tools=self.tool_use.offered,
            template_kwargs=effort_variables(effort) | (self.chat_template_kwargs or {}),
        )

    def keywords(self, request_id: str) -> GenerateParams:
        """Keywords for the SDK."""
        given = self.params(request_id)
        given["token_ids"] = False
        given["text_ends"] = True
        if self.max_output_tokens is not None:
            given["max_tokens"] = self.max_output_tokens
        if self._format is not None:
            given.update(self._format.keywords)
        if self.has_logprobs:
            given["logprobs"] = self.top_logprobs or 0
        if self.background:
            given.setdefault("on_disconnect", quire.OnDisconnect.CONTINUE)
        return given


def _first(*values: float | None) -> float:
    return next(each for each in values if each is not None)
