"""Completions and chat completions as they are answered, whole and as events."""

from typing import Literal

from gateway_svc.openapi.closed import NotRequired, TypedDict, closed

Reason = Literal["stop", "length", "cancelled", "deadline", "failed"]
ChatReason = Literal["stop", "length", "tool_calls", "cancelled", "deadline", "failed"]


@closed
class PromptDetails(TypedDict):
    """Tokens of the prompt that were in the prefix cache."""

    cached_tokens: int


@closed
class TokenUsage(TypedDict):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


@closed
class Logprobs(TypedDict):
    """Log-probabilities as lists that run in parallel."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@closed
class PromptLogprob(TypedDict):
    """A token of a prompt, or a likely one in its place."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; of the first token none


@closed
class Choice(TypedDict):
    """An output, or its next piece."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Reason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


@closed
class Completion(TypedDict):
    """Completions of a request."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: TokenUsage


@closed
class CompletionEvent(TypedDict):
    """Data of an event of streamed completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: NotRequired[TokenUsage | None]


@closed
class TopLogprob(TypedDict):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


@closed
class TokenLogprob(TopLogprob):
    """A token of the output, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


@closed
class ChatLogprobs(TypedDict):
    """Log-probabilities, an object for each token."""

    content: list[TokenLogprob]
    refusal: None


@closed
class Function(TypedDict):
    """Function of a call, with its arguments as JSON."""

    name: str
    arguments: str


@closed
class Call(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: Function


@closed
class Message(TypedDict):
    """The message of an answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


@closed
class ChatChoice(TypedDict):
    """An answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


@closed
class ChatCompletion(TypedDict):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


@closed
class FunctionDelta(TypedDict):
    """The next piece of a call's arguments; the first has the function's name."""

    name: NotRequired[str]
    arguments: str


@closed
class CallDelta(TypedDict):
    """The next piece of a call; the first has its id."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


@closed
class Delta(TypedDict):
    """The next piece of a message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[CallDelta]]


@closed
class ChatEventChoice(TypedDict):
    """The next piece of an answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


@closed
class ChatCompletionEvent(TypedDict):
    """Data of an event of streamed chat completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatEventChoice]
    usage: NotRequired[TokenUsage | None]
    prompt_token_ids: NotRequired[list[int]]
