"""Responses as they are answered: objects, items and events. What an object repeats is read from its annotation."""

from typing import Any, Literal

from pydantic import ConfigDict, create_model

from gateway_svc.openai.responses.annotation import Annotation
from gateway_svc.openai.responses.response_object import NOT_REPEATED
from gateway_svc.openapi.closed import TypedDict, closed
from gateway_svc.openapi.completion_objects import TokenLogprob
from gateway_svc.openapi.error_objects import ErrorDetails

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


@closed
class OutputTextPart(TypedDict):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[TokenLogprob]


@closed
class ReasoningPart(TypedDict):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


@closed
class OutputMessage(TypedDict):
    """A message of the output."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputTextPart]


@closed
class OutputReasoning(TypedDict):
    """Reasoning of the output."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[str]
    content: list[ReasoningPart]


@closed
class OutputCall(TypedDict):
    """A call of the output."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


@closed
class InputDetails(TypedDict):
    """Tokens of the input that were cached."""

    cached_tokens: int
    cache_write_tokens: int


@closed
class OutputDetails(TypedDict):
    """Tokens of the output that were reasoning."""

    reasoning_tokens: int


@closed
class ResponseUsage(TypedDict):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


@closed
class ResponseError(TypedDict):
    """Reason of a failure."""

    code: Literal["server_error"]
    message: str


@closed
class Incomplete(TypedDict):
    """Reason of an incomplete response."""

    reason: Literal["max_output_tokens"]


_kinds: dict[str, Any] = {
    "id": str,
    "object": Literal["response"],
    "created_at": int,
    "completed_at": int | None,
    "status": Status,
    **{name: each.annotation for name, each in Annotation.model_fields.items() if name not in NOT_REPEATED},
    "output": list[OutputItem],
    "error": ResponseError | None,
    "incomplete_details": Incomplete | None,
    "usage": ResponseUsage | None,
    "service_tier": Literal["default"],
}
_fields: dict[str, Any] = {name: (kind, ...) for name, kind in _kinds.items()}
ResponseObject: Any = create_model(
    "ResponseObject", __config__=ConfigDict(extra="forbid"), __doc__="A response.", **_fields
)


@closed
class DeletedResponse(TypedDict):
    """The answer to the deletion of a response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


@closed
class InputTokens(TypedDict):
    """The answer to a count."""

    object: Literal["response.input_tokens"]
    input_tokens: int


@closed
class Compaction(TypedDict):
    """A conversation as one item."""

    type: Literal["compaction"]
    id: str
    encrypted_content: str


@closed
class CompactedConversation(TypedDict):
    """The answer to a request to compact a conversation."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Compaction]
    usage: ResponseUsage


@closed
class InputItemList(TypedDict):
    """One page of the items of an input."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@closed
class StateEvent(TypedDict):
    """Data of an event with the response itself."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject


@closed
class ItemEvent(TypedDict):
    """Data of an event of an item that begins or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


@closed
class PartEvent(TypedDict):
    """Data of an event of a part that begins or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputTextPart | ReasoningPart


@closed
class OutputTextDelta(TypedDict):
    """Data of an event with more text."""

    type: Literal["response.output_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


@closed
class OutputTextDone(TypedDict):
    """Data of the event with a whole text."""

    type: Literal["response.output_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


@closed
class ReasoningDelta(TypedDict):
    """Data of an event with more reasoning."""

    type: Literal["response.reasoning_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


@closed
class ReasoningDone(TypedDict):
    """Data of the event with whole reasoning."""

    type: Literal["response.reasoning_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


@closed
class ArgumentsDelta(TypedDict):
    """Data of an event with more arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


@closed
class ArgumentsDone(TypedDict):
    """Data of the event with all arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


@closed
class ErrorEvent(TypedDict):
    """Data of the event of an error that ends the stream and not the response."""

    type: Literal["error"]
    sequence_number: int
    message: str
    param: str | None
    code: str | None
    error: ErrorDetails


ResponseEvent = (
    StateEvent
    | ItemEvent
    | PartEvent
    | OutputTextDelta
    | OutputTextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent
)
