"""Answers of each operation: the object of success, the data of its events, its headers, and the statuses of errors.

One row for an operation; a route without a row fails when the document is made. Knows no field of a request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway_svc.openapi import completion_objects as completions
from gateway_svc.openapi import message_objects as messages
from gateway_svc.openapi import other_objects as others
from gateway_svc.openapi import response_objects as responses
from quire import PinnedPrefix

# Statuses of errors, and what they say.
STATUSES = {
    400: "The request is wrong; the message says what to change.",
    401: "The API key is missing or unknown.",
    404: "There is no such model, request, response or prefix.",
    409: "The Idempotency-Key or the name belongs to something else, or the stream cannot be resumed.",
    413: "The body is too large.",
    415: "The body is no JSON by its `content-type`, or it is compressed.",
    429: "Too much is waiting; `retry-after` says when to try again.",
    499: "The request was cancelled.",
    500: "The gateway, or the deployment behind it, failed.",
    503: "Nothing can serve the request now; `retry-after` says when to try again.",
    504: "The request's deadline has passed.",
    529: "Nothing can serve the request now, as Anthropic's API says it.",
}
_SCHEDULER = (429, 500, 503, 504)  # of every call to the scheduler
_BODY = (400, 413, 415)
_GENERATION = (*_BODY, 404, 409, 499, *_SCHEDULER)
_ANTHROPIC = {503: 529}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers of one operation."""

    ok: Any  # type of the object; None: no content, str: text
    about: str = "Success."
    status: int = 200
    also: tuple[int, ...] = ()  # further statuses with the same object
    events: Any = None  # type of the data of its events, if it streams
    media_type: str = "application/json"
    id_header: str | None = None  # that has the id of the request
    errors: tuple[int, ...] = ()
    bare: tuple[int, ...] = ()  # further statuses without content
    is_anthropics: bool = False
    is_of_both: bool = False  # the API is that which a header names
    links: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # parameter of an operation that may follow
    is_open: bool = False  # without an API key

    @property
    def statuses(self) -> tuple[int, ...]:
        """Statuses of errors, as the API has them."""
        given = {*self.errors, *(() if self.is_open else (401,))}
        return tuple(sorted(_ANTHROPIC.get(each, each) if self.is_anthropics else each for each in given))


def _generating(ok: Any, events: Any, id_header: str = "x-request-id", **more: Any) -> Answers:
    return Answers(ok=ok, events=events, id_header=id_header, errors=_GENERATION, **more)


_RECORD = (400, 404, *_SCHEDULER)
_RESPONSE_OPERATIONS = ("retrieve_response", "delete_response", "list_input_items", "cancel_response")
_OF_RESPONSE = dict.fromkeys(_RESPONSE_OPERATIONS, ("response_id", "$response.body#/id"))
_OF_REQUEST = dict.fromkeys(("get_request", "cancel", "pause", "resume"), ("request_id", "$response.body#/id"))

ANSWERS: dict[tuple[str, str], Answers] = {
    ("post", "/v1/completions"): _generating(completions.Completion, completions.CompletionEvent, links=_OF_REQUEST),
    ("post", "/v1/chat/completions"): _generating(completions.ChatCompletion, completions.ChatCompletionEvent),
    ("post", "/v1/responses"): _generating(
        responses.ResponseObject, responses.ResponseEvent, links={**_OF_RESPONSE, **_OF_REQUEST}
    ),
    ("post", "/v1/responses/input_tokens"): Answers(ok=responses.InputTokens, errors=(*_BODY, 404, *_SCHEDULER)),
    ("post", "/v1/responses/compact"): _generating(responses.CompactedConversation, None),
    ("get", "/v1/responses/{response_id}"): Answers(
        ok=responses.ResponseObject, events=responses.ResponseEvent, id_header="x-request-id", errors=_RECORD
    ),
    ("delete", "/v1/responses/{response_id}"): Answers(
        ok=responses.DeletedResponse, id_header="x-request-id", errors=_RECORD
    ),
    ("get", "/v1/responses/{response_id}/input_items"): Answers(ok=responses.InputItemList, errors=_RECORD),
    ("post", "/v1/responses/{response_id}/cancel"): Answers(
        ok=responses.ResponseObject, id_header="x-request-id", errors=_RECORD
    ),
    ("post", "/v1/messages"): _generating(
        messages.AnsweredMessage, messages.MessageEvent, id_header="request-id", is_anthropics=True
    ),
    ("post", "/v1/messages/count_tokens"): Answers(
        ok=messages.TokenCount, errors=(*_BODY, 404, *_SCHEDULER), is_anthropics=True
    ),
    ("get", "/v1/models"): Answers(
        ok=others.ModelCards | others.AnthropicModels, errors=(*_SCHEDULER, 529), is_of_both=True
    ),
    ("get", "/v1/models/{name}"): Answers(
        ok=others.ModelCard | others.AnthropicModel, errors=(404, *_SCHEDULER, 529), is_of_both=True
    ),
    ("post", "/tokenize"): Answers(ok=others.TokenizedText, errors=(*_BODY, 404, *_SCHEDULER)),
    ("post", "/detokenize"): Answers(ok=others.DetokenizedText, errors=(*_BODY, 404, *_SCHEDULER)),
    ("get", "/requests"): Answers(ok=others.RequestList, errors=(400, *_SCHEDULER)),
    ("get", "/requests/{request_id}"): Answers(ok=others.Record, errors=_RECORD),
    ("post", "/requests/{request_id}/cancel"): Answers(ok=others.State, errors=_RECORD),
    ("post", "/requests/{request_id}/pause"): Answers(ok=others.State, errors=(*_RECORD, 413, 415)),
    ("post", "/requests/{request_id}/resume"): Answers(ok=others.State, errors=_RECORD),
    ("get", "/prefixes"): Answers(ok=others.PrefixList, errors=(400, *_SCHEDULER)),
    ("put", "/prefixes/{name}"): Answers(
        ok=PinnedPrefix,
        about="The same prefix is pinned already; 201: it is new.",
        also=(201,),
        links={"unpin": ("name", "$response.body#/name")},
        errors=(*_BODY, 404, 409, *_SCHEDULER),
    ),
    ("delete", "/prefixes/{name}"): Answers(ok=None, status=204, errors=_RECORD),
    ("get", "/health"): Answers(ok=None, about="This process answers.", errors=(500,), is_open=True),
    ("get", "/ping"): Answers(ok=None, about="This process answers.", errors=(500,), is_open=True),
    ("post", "/ping"): Answers(ok=None, about="This process answers.", errors=(413, 500), is_open=True),
    ("get", "/version"): Answers(ok=others.Version, errors=(500,)),
    ("get", "/ready"): Answers(
        ok=None, about="Requests can be served now; 503: not now.", bare=(503,), errors=(500,), is_open=True
    ),
    ("get", "/metrics"): Answers(ok=str, media_type="text/plain", errors=(500,), is_open=True),
    ("get", "/openapi.json"): Answers(ok=dict[str, Any], about="This document."),
}
