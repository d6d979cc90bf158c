"""Messages of Anthropic's API as they are answered, whole and as events, and counts of tokens."""

from typing import Any, Literal

from gateway_svc.openapi.closed import TypedDict, closed
from gateway_svc.openapi.error_objects import MessageError

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


@closed
class MessageUsage(TypedDict):
    """Counts of tokens; cached ones are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


@closed
class AnsweredText(TypedDict):
    """A block of text."""

    type: Literal["text"]
    text: str


@closed
class AnsweredThinking(TypedDict):
    """A block of reasoning; empty, and in its signature, where it is omitted."""

    type: Literal["thinking"]
    thinking: str
    signature: str


@closed
class AnsweredToolUse(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnsweredBlock = AnsweredText | AnsweredThinking | AnsweredToolUse


@closed
class AnsweredMessage(TypedDict):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


@closed
class TokenCount(TypedDict):
    """Tokens of an input."""

    input_tokens: int


@closed
class MessageStart(TypedDict):
    """Data of the first event: the message without content."""

    type: Literal["message_start"]
    message: AnsweredMessage


@closed
class BlockStart(TypedDict):
    """Data of the event with which a block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: AnsweredBlock


@closed
class TextDelta(TypedDict):
    """The next piece of text."""

    type: Literal["text_delta"]
    text: str


@closed
class ThinkingDelta(TypedDict):
    """The next piece of reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


@closed
class SignatureDelta(TypedDict):
    """The signature of a block of reasoning."""

    type: Literal["signature_delta"]
    signature: str


@closed
class InputDelta(TypedDict):
    """The next piece of a call's input, as JSON."""

    type: Literal["input_json_delta"]
    partial_json: str


@closed
class BlockDelta(TypedDict):
    """Data of the event of the next piece of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


@closed
class BlockStop(TypedDict):
    """Data of the event with which a block ends."""

    type: Literal["content_block_stop"]
    index: int


@closed
class Stop(TypedDict):
    """Reason of the end of a message."""

    stop_reason: StopReason | None
    stop_sequence: str | None


@closed
class MessageDelta(TypedDict):
    """Data of the event that says why the message ended."""

    type: Literal["message_delta"]
    delta: Stop
    usage: MessageUsage


@closed
class OtherEvent(TypedDict):
    """Data of an event that says nothing more."""

    type: Literal["ping", "message_stop"]


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | OtherEvent | MessageError
