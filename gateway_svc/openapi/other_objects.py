"""Answers beside those with output: models, tokens, requests, prefixes.

What the SDK has a dataclass for is read from it.
"""

from typing import Literal

import quire
from gateway_svc.openapi.closed import TypedDict, closed


@closed
class Version(TypedDict):
    """Version of the server."""

    version: str


@closed
class ModelCard(TypedDict):
    """The model in OpenAI's form."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


@closed
class ModelCards(TypedDict):
    """The one model in a list."""

    object: Literal["list"]
    data: list[ModelCard]


@closed
class AnthropicModel(TypedDict):
    """The model in Anthropic's form."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


@closed
class AnthropicModels(TypedDict):
    """The one page with the one model."""

    data: list[AnthropicModel]
    has_more: Literal[False]
    first_id: str
    last_id: str


@closed
class TokenizedText(TypedDict):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@closed
class DetokenizedText(TypedDict):
    """Text of token ids."""

    prompt: str


@closed
class RequestList(TypedDict):
    """One page of the requests that have not ended."""

    data: list[quire.RequestSummary]
    next_page_token: str | None


@closed
class RecordedSample(TypedDict):
    """An output so far."""

    index: int
    text: str
    finish_reason: quire.FinishReason | None


@closed
class Record(TypedDict):
    """State, output and usage of a request."""

    request_id: str
    state: quire.RequestState
    waiting_for: str | None
    error: str | None
    created: int
    tenant: str
    samples: list[RecordedSample]
    usage: quire.Usage


@closed
class State(TypedDict):
    """State of a request after the call."""

    state: quire.RequestState


@closed
class PrefixList(TypedDict):
    """The pinned prefixes of a tenant."""

    data: list[quire.PinnedPrefix]
