"""The answer to a call that failed, in the shape of the API that was called."""

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway_svc.anthropic.errors import error_response as anthropic_error
from gateway_svc.api_error import ApiError
from gateway_svc.openai.errors import error_response as openai_error

_MESSAGES, _MODELS = "/v1/messages", "/v1/models"
_BUSY_S = 1.0  # until a connection may be free


def error_answer(scope: Scope, error: ApiError) -> Response:
    """The answer that says so, to the call with this scope."""
    return anthropic_error(error) if _is_anthropics(scope) else openai_error(error)


async def answer_busy(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer in place of the application where more connections are open than are allowed."""
    message = "too many connections are open here: try again, or another gateway"
    error = ApiError(503, message, kind="server_error", code="too_many_connections", retry_after_s=_BUSY_S)
    response = error_answer(scope, error)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


def _is_anthropics(scope: Scope) -> bool:
    """True for its own paths; models are of both APIs, whose clients differ in a header."""
    path: str = scope["path"]
    if _is_within(path, _MODELS):
        return "anthropic-version" in Headers(scope=scope)
    return _is_within(path, _MESSAGES)


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")
