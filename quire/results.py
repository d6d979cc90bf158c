"""What comes back: plain frozen data. Knows no wire."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why an output ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"


class RequestState(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        return self not in (RequestState.WAITING, RequestState.RUNNING)


class Health(Enum):
    """What grpc.health.v1 says of a service."""

    SERVING = "SERVING"
    NOT_SERVING = "NOT_SERVING"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCause:
    """What stopped an output; exactly one is set."""

    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an output."""

    reason: FinishReason
    cause: StopCause | None = None  # with STOP


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one token, and of the most likely ones in its place."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), best first


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds since the request's arrival at the scheduler; None: not reached."""

    accepted_s: float = 0.0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is durable: it will reach exactly one terminal state."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    seed: int
    attached: bool  # it was known before


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of the output."""

    position: int  # of its first token in the output
    num_tokens: int
    text: str  # may lag behind the tokens: incomplete characters and beginnings of stop strings are held back
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The terminal state of a request."""

    state: RequestState
    usage: Usage
    timings: Timings
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole output of a request."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_cause: StopCause | None
    usage: Usage
    timings: Timings
    seed: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request as the server remembers it, during its life and for a while after."""

    request_id: str
    state: RequestState
    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None
    usage: Usage
    timings: Timings
    error: str
    created_unix_s: float
    seed: int
    tenant: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Text as the model sees it."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]  # as the vocabulary spells them


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model being served."""

    name: str
    fingerprint: str
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    has_chat_template: bool
