"""`/v1/chat/completions`: conversations, answered whole or as events."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

import quire
from gateway_svc.answering import answer
from gateway_svc.api_error import invalid, sdk_refusals
from gateway_svc.generation import Generation, new_request_id
from gateway_svc.openai.completion_call import CompletionCall
from gateway_svc.openai.fields import MAX_LOGPROBS, GenerationFields
from gateway_svc.openai.logprobs import chat_logprobs
from gateway_svc.request_fields import FIELD_NAMES, ApiModel, Ignored, Unsupported
from gateway_svc.resumption import event_counts
from gateway_svc.served_model import ServedModel
from gateway_svc.vocabulary import Vocabulary, ids_of
from quire.params import GenerateParams

_NAMES = {
    **FIELD_NAMES,
    "prompt": "messages",
    "logprobs": "top_logprobs",
    "max_tokens": "max_completion_tokens",
}
_SYSTEM_ROLES = ("system", "developer")  # chat templates know the first


class TextPart(ApiModel):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Ignored


class ChatMessage(ApiModel):
    """A message of a conversation: text, or parts of text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Ignored
    type: Ignored
    refusal: Ignored
    audio: Unsupported
    tool_calls: Unsupported
    tool_call_id: Unsupported
    function_call: Unsupported

    @property
    def text(self) -> str:
        """The text; parts are lines of their own."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())


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
    prompt_cache_key: Ignored
    prompt_cache_retention: Ignored
    prompt_cache_options: Ignored
    reasoning_effort: Ignored
    verbosity: Ignored
    audio: Unsupported
    function_call: Unsupported
    functions: Unsupported
    moderation: Unsupported
    parallel_tool_calls: Ignored
    prediction: Unsupported
    tool_choice: Unsupported
    tools: Unsupported
    web_search_options: Unsupported

    @property
    def names(self) -> Mapping[str, str]:
        """See GenerationFields."""
        if self.response_format is None:
            return _NAMES
        return {**_NAMES, "structured_output": "response_format", "json_schema": "response_format.json_schema"}

    def keywords(self, request_id: str) -> GenerateParams:
        """Keywords for the SDK. Raises ApiError for fields that contradict each other."""
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


class Chats:
    """Answers requests for chat completions."""

    def __init__(self, client: quire.AsyncClient, model: ServedModel, vocabulary: Vocabulary) -> None:
        self._client = client
        self._model = model
        self._vocabulary = vocabulary

    async def answer(
        self, body: ChatRequest, idempotency_key: str | None, last_event_id: str | None = None
    ) -> Response:
        """The answer to a request. Raises ApiError."""
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs", "give logprobs as well")
        name = await self._model.check(body.model)
        call = _Call(body, name, new_request_id("chatcmpl-", idempotency_key, body.tenant), self._vocabulary)
        counts = event_counts(idempotency_key, last_event_id, body.num_outputs, streamed=bool(body.stream))
        keywords = body.keywords(call.request_id)
        keywords["text_ends"] = idempotency_key is not None  # whether or not this time it streams
        with sdk_refusals(call.names):
            stream = self._client.stream_chat(
                turns_of(body.messages),
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=bool(body.continue_final_message),
                **keywords,
            )
        generation = Generation([stream], body.num_outputs, detaches=idempotency_key is not None)
        return await answer(generation, call, streamed=bool(body.stream), counts=counts)


def turns_of(messages: Sequence[ChatMessage]) -> list[quire.ChatMessage]:
    """Messages for the SDK."""
    return [quire.ChatMessage("system" if each.role in _SYSTEM_ROLES else each.role, each.text) for each in messages]


class _Call(CompletionCall):
    """One request for a chat completion: makes its objects of the output."""

    def __init__(self, body: ChatRequest, model: str, request_id: str, vocabulary: Vocabulary) -> None:
        super().__init__(body, "chat.completion.chunk" if body.stream else "chat.completion", model, request_id)
        self._body = body
        self._vocabulary = vocabulary

    async def whole(self, completions: Sequence[quire.Completion], usage: quire.Usage) -> bytes:
        """The whole answer."""
        choices = []
        for sample in completions[0].samples:
            choice: dict[str, Any] = {
                "index": sample.index,
                "message": {"role": "assistant", "content": sample.text, "refusal": None, "annotations": []},
                "logprobs": await self._logprobs(sample.logprobs),
                "finish_reason": sample.finish_reason.value,
            }
            if self._body.return_token_ids:
                choice["token_ids"] = sample.token_ids
            choices.append(choice)
        return self.to_json(choices, usage)

    def first_events(self, num_prompt_tokens: int) -> Iterable[bytes]:
        """An event for each output, which says who speaks."""
        return [
            self._event(output, {"role": "assistant", "content": "", "refusal": None}, None, None)
            for output in range(self._body.num_outputs)
        ]

    async def event(self, output: int, chunk: quire.Chunk) -> bytes | None:
        """The event of a chunk; None if it has nothing to say yet."""
        has_ids = self._body.return_token_ids and chunk.token_ids
        if not (chunk.text or chunk.logprobs or chunk.finish or has_ids):
            return None
        delta = {"content": chunk.text} if chunk.text or chunk.logprobs or has_ids else {}
        reason = chunk.finish.reason.value if chunk.finish else None
        logprobs = await self._logprobs(chunk.logprobs) if chunk.logprobs else None
        return self._event(output, delta, logprobs, reason, chunk.token_ids if has_ids else None)

    def _event(
        self,
        output: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        reason: str | None,
        token_ids: Sequence[int] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": output, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if token_ids is not None:
            choice["token_ids"] = token_ids
        return self.choice_event(choice)

    async def _logprobs(self, logprobs: Sequence[quire.TokenLogprobs]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        await self._vocabulary.load(ids_of(logprobs))
        num_top = self._body.top_logprobs or 0
        return {"content": chat_logprobs(logprobs, num_top, self._vocabulary), "refusal": None}
