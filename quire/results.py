"""Results of calls: plain frozen data. Knows no wire."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from quire.params import ChatMessage, SamplingParams
from quire.parsing.answer_format import AnswerFormat
from quire.parsing.deltas import Delta


class FinishReason(Enum):
    """Reason why an output ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"


class RequestState(Enum):
    """State of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        return self not in (RequestState.WAITING, RequestState.RUNNING, RequestState.PAUSED)


class Health(Enum):
    """Health of a service, as in grpc.health.v1."""

    SERVING = "SERVING"
    NOT_SERVING = "NOT_SERVING"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCause:
    """Token or string that stopped an output; exactly one is set."""

    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an output."""

    reason: FinishReason
    cause: StopCause | None = None  # with STOP
    score: float | None = None  # by which it was ranked, higher is better: of a beam, or of one of best_of
    sample_index: int = 0  # selects the sampling noise


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
class RequestMemory:
    """KV memory of a request, now or when its first sample ended, and the copies and swaps made for it."""

    blocks: int = 0  # on the device
    shared_blocks: int = 0  # of them, those that several of its samples hold
    saved_blocks: int = 0  # blocks that it would hold in addition if its samples shared none
    host_blocks: int = 0  # in the swap pool
    copied_blocks: int = 0  # so far, by copy-on-write
    swapped_out_blocks: int = 0  # so far
    swapped_in_blocks: int = 0  # so far
    fetched_blocks: int = 0  # so far, from other workers
    recomputed_tokens: int = 0  # so far: computed again, after a preemption or the loss of a worker

    @property
    def saving(self) -> float | None:
        """Blocks saved by sharing / blocks without sharing, as the paper's Fig. 15 counts; None without blocks."""
        unshared = self.blocks + self.saved_blocks
        return self.saved_blocks / unshared if unshared else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds since the request's arrival at the scheduler; None: not reached, or unknown to a later leader."""

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
    attached: bool  # the server knew the request before
    num_samples: int  # that will come back; a beam search may find fewer
    in_reasoning: bool = False  # the prompt ends within reasoning, and so the output begins there
    created_unix_s: float = 0.0  # time of arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of one sample's output."""

    index: int = 0  # of the sample
    position: int  # of its first token in the sample's output
    num_tokens: int
    text: str  # may lag behind the tokens: incomplete characters and beginnings of stop strings are held back
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish: Finish | None = None  # with the sample's last chunk
    text_ends: Sequence[int] = ()  # characters of `text` up to each token; what is behind was held back until the end
    deltas: Sequence[Delta] = ()  # of a chat with an answer_format: what the text means


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The terminal state of a request."""

    state: RequestState
    usage: Usage
    timings: Timings
    memory: RequestMemory
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One whole output."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_cause: StopCause | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None  # as in Finish
    sample_index: int = 0  # as in Finish
    message: ChatMessage | None = None  # of a chat with an answer_format: the answer, to go on with


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The whole output of a request: its samples. The fields of the first go by their own names too."""

    request_id: str
    samples: tuple[Sample, ...]  # at least one; best first where they were ranked, else by sample_index
    usage: Usage
    timings: Timings
    memory: RequestMemory
    seed: int
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def stop_cause(self) -> StopCause | None:
        return self.samples[0].stop_cause

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.samples[0].logprobs

    @property
    def score(self) -> float | None:
        return self.samples[0].score

    @property
    def message(self) -> ChatMessage | None:
        return self.samples[0].message


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutput:
    """One output so far."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None  # None: not ended yet


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request as the server remembers it, during its life and for a while after.

    The fields of its first sample go by their own names too.
    """

    request_id: str
    state: RequestState
    samples: tuple[SampleOutput, ...]  # empty before there is output
    usage: Usage
    timings: Timings
    memory: RequestMemory
    error: str
    created_unix_s: float
    seed: int
    tenant: str
    annotation: bytes = b""  # as it was submitted
    in_reasoning: bool = False  # as in Accepted
    waiting_for: str | None = None  # in words for people, which may change; None: it runs or has ended

    @property
    def text(self) -> str:
        return self.samples[0].text if self.samples else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids if self.samples else ()

    @property
    def finish(self) -> Finish | None:
        return self.samples[0].finish if self.samples else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPrefix:
    """A prefix whose blocks are kept, and shared by the requests of its tenant and salt that begin with it."""

    name: str
    tenant: str
    cache_salt: str
    num_tokens: int  # those of its full blocks
    num_blocks: int  # on each worker that has it
    worker_ids: tuple[str, ...]  # that have it now
    created: bool = False  # by the call that gave this


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
    tool_parser: str | None = None  # format of its tool calls; None: not known
    reasoning_parser: str | None = None  # format of its reasoning; None: not known
    sampling_defaults: SamplingParams = field(default_factory=SamplingParams)  # of requests that leave them out

    @property
    def answer_format(self) -> AnswerFormat:
        """Format of its answers, for chats."""
        return AnswerFormat(tool_parser=self.tool_parser, reasoning_parser=self.reasoning_parser)
