"""Parameters of a request, in groups and as flat keywords, and the options of a client.

`protos/quire/v1/inference.proto` documents the values, and the server checks them. Knows no wire.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypedDict

from quire.parsing.deltas import ToolCall

DEFAULT_ADDRESS = "127.0.0.1:7847"
PIN_TIMEOUT_S = 120.0  # a prefix is computed as a prompt is, behind what is before it

EarlyStopping = bool | Literal["never"]
PauseKeep = Literal["auto", "tokens"]
JsonWhitespace = Literal["compact", "flexible"]


class OnDisconnect(Enum):
    """Fate of a request when its last reader is gone."""

    CANCEL = "cancel"  # after the server's grace period, unless a reader attaches
    CONTINUE = "continue"  # run to the end; `attach` or `get` reads it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Choice of each next token. None: the server's default."""

    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    first_sample_index: int | None = None
    n: int | None = None  # samples that come back
    best_of: int | None = None  # samples that are drawn, of which the n best come back


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """A beam search, as `transformers` defines it; `n` of its best hypotheses come back. None: the server's default."""

    beam_width: int
    length_penalty: float | None = None  # score = summed log-probability / num_tokens ** length_penalty
    early_stopping: EarlyStopping | None = None  # whether beam_width finished hypotheses end the search at once


@dataclass(frozen=True, slots=True, kw_only=True)
class StopParams:
    """Conditions that end the output. None: the server's default."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    include_stop: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParams:
    """Output to return besides text."""

    token_ids: bool = True
    logprobs: int | None = None  # 0: of the sampled token alone; k: and of the k most likely
    prompt_logprobs: int | None = None
    keep_special_tokens: bool | None = None
    text_ends: bool | None = None  # place of each token in the text


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A constraint on the output's text, of exactly one kind."""

    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool | None = None  # any JSON object
    regex: str | None = None
    choice: Sequence[str] | None = None  # one of these texts
    lark: str | None = None  # a grammar
    json_whitespace: JsonWhitespace | None = None  # flexible: as the model likes; default: compact

    @property
    def has_reasoning(self) -> bool:
        """True if the output may have reasoning before its content: only a grammar can have a place for it."""
        return self.lark is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """Parameters of one request."""

    sampling: SamplingParams = SamplingParams()
    stopping: StopParams = StopParams()
    output: OutputParams = OutputParams()
    beam: BeamParams | None = None  # None: samples are drawn
    structured_output: StructuredOutput | None = None  # None: any text
    request_id: str | None = None  # None: the SDK makes one
    timeout_s: float | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    session_key: str | None = None  # requests with equal ones go to one shard, but by their id if it is yours; "": none
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL
    priority: int | None = None  # from -1000 to 1000; lower is served first
    annotation: bytes | None = None  # the client's own note, kept with the request: see `RequestRecord`


class GenerateParams(TypedDict, total=False):
    """Keywords of `generate`, `stream`, `chat` and `stream_chat`; a flat one wins over its group's."""

    sampling: SamplingParams
    stopping: StopParams
    output: OutputParams
    beam: BeamParams
    structured_output: StructuredOutput
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    seed: int
    first_sample_index: int
    n: int
    best_of: int
    beam_width: int
    length_penalty: float
    early_stopping: EarlyStopping
    json_schema: Mapping[str, Any] | str
    json_object: bool
    regex: str
    choice: Sequence[str]
    lark: str
    json_whitespace: JsonWhitespace
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    token_ids: bool
    logprobs: int
    prompt_logprobs: int
    keep_special_tokens: bool
    text_ends: bool
    request_id: str
    timeout_s: float
    tenant: str
    cache_salt: str
    session_key: str
    on_disconnect: OnDisconnect
    priority: int
    annotation: bytes


def gather(keywords: GenerateParams) -> RequestParams:
    """Sort keywords into groups. Raises TypeError if one is unknown, ValueError for beam options without beam_width."""
    loose: dict[str, Any] = {name: value for name, value in keywords.items() if value is not None}
    groups = {
        "sampling": _group(SamplingParams, "sampling", loose),
        "stopping": _group(StopParams, "stopping", loose),
        "output": _group(OutputParams, "output", loose),
        "beam": _beam(loose),
        "structured_output": _structured_output(loose),
    }
    own = {field.name for field in dataclasses.fields(RequestParams)}
    unknown = sorted(loose.keys() - own)
    if unknown:
        raise _unknown("parameter", unknown[0], GenerateParams.__annotations__)
    given: dict[str, Any] = {**loose, **groups}
    return RequestParams(**given)


def _group(kind: type[Any], name: str, loose: dict[str, Any]) -> object:
    """Takes the group and its flat fields out of `loose`."""
    base = loose.pop(name, None)
    if base is None:
        base = kind()
    elif not isinstance(base, kind):
        raise TypeError(f"{name} must be {kind.__name__}, not {type(base).__name__}")
    mine = {field.name: loose.pop(field.name) for field in dataclasses.fields(kind) if field.name in loose}
    return dataclasses.replace(base, **mine)


def _beam(loose: dict[str, Any]) -> object:
    """Take the beam group and its flat fields out of `loose`; None if it was not asked for."""
    flat = [field.name for field in dataclasses.fields(BeamParams) if field.name in loose]
    if flat and "beam" not in loose:
        if "beam_width" not in flat:
            raise ValueError(f"{flat[0]} belongs to a beam search: give beam_width as well")
        loose["beam"] = BeamParams(beam_width=loose["beam_width"])
    return _group(BeamParams, "beam", loose) if "beam" in loose else None


def _structured_output(loose: dict[str, Any]) -> object:
    """Take the constraint and its flat fields out of `loose`; None if there is none."""
    names = {field.name for field in dataclasses.fields(StructuredOutput)}
    is_given = "structured_output" in loose or not names.isdisjoint(loose)
    return _group(StructuredOutput, "structured_output", loose) if is_given else None


def _unknown(what: str, name: str, known: Iterable[str]) -> TypeError:
    near = difflib.get_close_matches(name, list(known), n=1)
    return TypeError(f"there is no {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str  # in the words of the model's chat template: usually "system", "user", "assistant" or "tool"
    content: str = ""
    tool_calls: Sequence[ToolCall] = ()  # that the assistant made
    tool_call_id: str = ""  # of the call that a tool answers
    name: str = ""  # of the speaker, or of the tool that answers
    reasoning: str = ""  # before the content; the chat template may drop it


Messages = Sequence[ChatMessage | Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]  # in the form of OpenAI's API, for the chat template


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation with what its template gets besides the messages."""

    messages: Messages
    tools: Tools | None = None
    template_kwargs: Mapping[str, Any] | None = None  # further variables of the template
    add_generation_prompt: bool | None = None  # open the assistant's turn; None: unless the last message is continued
    continue_final_message: bool = False  # continue the content of the last message instead of answering it


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Timeouts, retries and buffers of a client, and how it and its server know each other."""

    timeout_s: float | None = None  # of requests without a timeout of their own; None: no bound
    connect_timeout_s: float = 3.0  # to reach a server: of a request, the first time; of other calls, each time
    reconnect_timeout_s: float = 30.0  # of requests: to reach a server again
    call_timeout_s: float = 10.0  # of calls other than requests: for each answer, and for a refusal to pass
    retries: int = 4  # of a submission or call refused as overloaded or unavailable
    buffer_tokens: int = 4096  # unread tokens held for each request
    api_key: str | None = dataclasses.field(default=None, repr=False)  # None: the first of QUIRE_API_KEY
    tls_root: str | None = None  # PEM file of root certificates, or "public"; None: QUIRE_TLS_ROOT, else no encryption
    tls_server_name: str | None = None  # in the server's certificate; None: QUIRE_TLS_SERVER_NAME, else the host
    tls_client_cert: str | None = None  # PEM file for servers that ask for one; None: QUIRE_TLS_CLIENT_CERT, else none
    tls_client_key: str | None = None  # PEM file of its key; None: QUIRE_TLS_CLIENT_KEY


class ClientKeywords(TypedDict, total=False):
    """`ClientOptions` as keywords."""

    timeout_s: float | None
    connect_timeout_s: float
    reconnect_timeout_s: float
    call_timeout_s: float
    retries: int
    buffer_tokens: int
    api_key: str | None
    tls_root: str | None
    tls_server_name: str | None
    tls_client_cert: str | None
    tls_client_key: str | None


def client_options(keywords: ClientKeywords) -> ClientOptions:
    """The options of a client. Raises TypeError on an unknown one, or one of another type, ValueError out of range."""
    known = ClientKeywords.__annotations__
    for name in keywords:
        if name not in known:
            raise _unknown("option", name, known)
    options = ClientOptions(**keywords)
    if options.timeout_s is not None:
        check_seconds("timeout_s", options.timeout_s)
    check_seconds("connect_timeout_s", options.connect_timeout_s)
    check_seconds("reconnect_timeout_s", options.reconnect_timeout_s, may_be_zero=True)
    check_seconds("call_timeout_s", options.call_timeout_s)
    _check_count("retries", options.retries, 0)
    _check_count("buffer_tokens", options.buffer_tokens, 1)
    for name in ("api_key", "tls_root", "tls_server_name", "tls_client_cert", "tls_client_key"):
        _check_text(name, getattr(options, name))
    return options


_MOST_SECONDS = 1e9


def check_seconds(name: str, value: object, *, may_be_zero: bool = False) -> None:
    """Raise TypeError or ValueError for what is no time that gRPC and event loops can wait."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not (0 < value < _MOST_SECONDS or (may_be_zero and value == 0)):
        raise ValueError(f"{name} must be {'at least' if may_be_zero else 'above'} 0 and below 1e9 s, not {value!r}")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str | None):
        raise TypeError(f"{name} must be a string, not {type(value).__name__}")


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value!r}")
