"""Errors in the shape of Anthropic's API, with its types and statuses."""

import uuid
from typing import Any

import orjson
from starlette.responses import Response

from gateway_svc.api_error import ApiError

ID_HEADER = "request-id"
_THREAD = "thread_unsupported_request"  # Anthropic's client sends the whole conversation after it
_OVERLOADED = 529
_STATUSES = {503: _OVERLOADED}  # Anthropic's, where it has another one
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",  # the request was cancelled, which is no fault of it
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


def error_object(error: ApiError, request_id: str) -> dict[str, Any]:
    """The JSON object that says so."""
    status = _status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"details": {"error_code": _THREAD, "unsupported": ["thread"]}} if error.code == _THREAD else {}
    return {"type": "error", "error": {"type": kind, "message": error.message, **details}, "request_id": request_id}


def no_threads() -> ApiError:
    """The refusal to keep the state of a conversation."""
    message = "thread: this server keeps no threads; send the whole conversation"
    return ApiError(400, message, param="thread", code=_THREAD)


def error_response(error: ApiError) -> Response:
    """The answer that says so; a call that submitted no request gets an id of its own."""
    request_id = error.request_id or f"req_{uuid.uuid4().hex}"
    body = orjson.dumps(error_object(error, request_id))
    headers = error.headers | {ID_HEADER: request_id}
    return Response(body, _status(error), headers, media_type="application/json")


def _status(error: ApiError) -> int:
    return _STATUSES.get(error.status, error.status)
