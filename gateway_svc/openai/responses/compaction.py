"""`/v1/responses/compact`: a conversation as one item, which has a summary of it that the served model writes.

Keeps nothing: the item is the summary, encoded, and a later request gives it as input.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

import quire
from gateway_svc.api_error import ApiError, from_quire, invalid
from gateway_svc.openai.responses.annotation import ID_PREFIX
from gateway_svc.openai.responses.item_references import ItemReferences
from gateway_svc.openai.responses.items import GivenItem, InputCompaction, items_of
from gateway_svc.openai.responses.response_object import usage_object
from gateway_svc.openai.responses.stored_responses import StoredResponses
from gateway_svc.openai.responses.truncation import ANSWER_PART, last_turns_that_fit
from gateway_svc.openai.responses.turns import turns_of
from gateway_svc.request_fields import ApiModel, Ignored, Items
from gateway_svc.served_model import ServedModel
from quire.params import GenerateParams

_MOST_TOKENS = 2048  # of a summary, and at most a quarter of the context
_MOST_WITH_REASONING = 8192  # of a summary and the reasoning before it, and at most a quarter, too
_TASK = (
    "Summarize the conversation above for whoever goes on with it: what is wanted, what was decided, done and found, "
    "names, numbers and quotations that matter, and what is still open. Answer with the summary alone."
)
_NAMES = {"prompt": "input", "messages": "input"}
_SAME_NAMES = ("priority", "cache_salt", "timeout_s", "tenant")


class CompactionRequest(ApiModel):
    """The body of a request to compact a conversation."""

    model: str | None = Field(None, description="Name of the served model, if given.")
    input: str | Items[GivenItem] | None = Field(None, description="Text, or the items of a conversation.")
    previous_response_id: str | None = Field(
        None, max_length=128, description="Stored response whose conversation comes first."
    )
    instructions: str | None = Field(None, description="What the summary is to heed.")
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_options: Ignored
    prompt_cache_retention: Ignored
    service_tier: Ignored
    priority: int | None = Field(None, description="Class from -1000 to 1000; lower is served first.")
    cache_salt: str | None = Field(None, description="Only requests with equal salts share cached prefixes.")
    timeout_s: float | None = Field(None, description="Ends the request after this time with an error.")
    tenant: str | None = None

    def keywords(self, request_id: str, max_tokens: int) -> GenerateParams:
        """Keywords for the SDK."""
        given: Any = {"request_id": request_id, "max_tokens": max_tokens}
        given |= {name: value for name in _SAME_NAMES if (value := getattr(self, name)) is not None}
        keywords: GenerateParams = given
        return keywords


class Compactions:
    """Has the served model summarize conversations."""

    def __init__(
        self, client: quire.AsyncClient, model: ServedModel, stored: StoredResponses, references: ItemReferences
    ) -> None:
        self._client = client
        self._model = model
        self._stored = stored
        self._references = references

    async def compact(self, body: CompactionRequest) -> dict[str, object]:
        """The compacted conversation. Raises ApiError, and QuireError where the scheduler cannot be asked."""
        await self._model.check(body.model)
        model = await self._model.get()
        turns = []
        if body.previous_response_id is not None:
            turns = await self._stored.conversation(body.previous_response_id, body.tenant)
        turns += turns_of(await self._references.resolve(items_of(body.input or []), body.tenant))
        if not turns:
            raise invalid("input", "there is nothing to compact: give items, or previous_response_id")
        most_tokens = _most_tokens(model)
        request_id = self._client.new_request_id(prefix=ID_PREFIX, tenant=body.tenant, cache_salt=body.cache_salt)

        def chat(kept: Sequence[quire.ChatMessage]) -> quire.Chat:
            return quire.Chat(messages=[_asked(kept, body.instructions)])

        kept = await last_turns_that_fit(
            self._client, chat, turns, model.max_model_len - most_tokens, begins_anywhere=True
        )
        try:
            stream = self._client.stream_chat(
                chat(kept).messages, answer_format=model.answer_format, **body.keywords(request_id, most_tokens)
            )
            async with stream:
                created_unix_s = (await stream.accepted()).created_unix_s
                completion = await stream.completion()
        except quire.QuireError as error:
            raise from_quire(error, _NAMES, request_id) from error
        summary = _summary(completion)
        return {
            "id": request_id,
            "object": "response.compaction",
            "created_at": int(created_unix_s),
            "output": [InputCompaction.of(summary).to_item(f"cmp_{request_id.removeprefix(ID_PREFIX)}")],
            "usage": usage_object(completion.usage),
        }


def _most_tokens(model: quire.Model) -> int:
    most = _MOST_TOKENS if model.answer_format.reasoning_parser is None else _MOST_WITH_REASONING
    return max(1, min(most, model.max_model_len // ANSWER_PART))


def _summary(completion: quire.Completion) -> str:
    """The whole summary. Raises ApiError without one: the client puts it in the place of its conversation."""
    summary = completion.text if completion.message is None else completion.message.content
    if not summary.strip():
        raise _failed(completion.request_id, "the model wrote no summary", "no_summary")
    if completion.finish_reason is quire.FinishReason.LENGTH:
        raise _failed(completion.request_id, "the summary was cut short, since it is too long", "summary_too_long")
    return summary


def _failed(request_id: str, reason: str, code: str) -> ApiError:
    message = f"The conversation was not compacted: {reason}. Go on with the conversation as it is, or try again."
    return ApiError(500, message, kind="server_error", code=code, request_id=request_id)


def _asked(turns: Sequence[quire.ChatMessage], instructions: str | None) -> quire.ChatMessage:
    """One message with the conversation as text: templates differ in the turns that they take behind each other."""
    heeded = [] if instructions is None else [f"It has these instructions: {instructions}"]
    return quire.ChatMessage("user", "\n\n".join([*map(_said, turns), _TASK, *heeded]))


def _said(turn: quire.ChatMessage) -> str:
    calls = [f"(calls {call.name} with {call.arguments})" for call in turn.tool_calls]
    return f"{turn.role}: " + "\n".join([*([turn.content] if turn.content else []), *calls])
