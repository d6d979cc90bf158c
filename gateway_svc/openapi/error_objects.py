"""Errors as the APIs answer them."""

from typing import Literal

from gateway_svc.openapi.closed import NotRequired, TypedDict, closed


@closed
class ErrorDetails(TypedDict):
    """Details of an error; `param` is the field of the body, or the header, that it is about."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


@closed
class Error(TypedDict):
    """An error in the shape of OpenAI's API."""

    error: ErrorDetails


@closed
class UnsupportedThread(TypedDict):
    """Details of the refusal of a thread, after which Anthropic's client sends the whole conversation."""

    error_code: Literal["thread_unsupported_request"]
    unsupported: list[str]


@closed
class MessageErrorDetails(TypedDict):
    """Details of an error, in the words of Anthropic's API."""

    type: Literal[
        "api_error",
        "authentication_error",
        "invalid_request_error",
        "not_found_error",
        "overloaded_error",
        "permission_error",
        "rate_limit_error",
        "request_too_large",
        "timeout_error",
    ]
    message: str
    details: NotRequired[UnsupportedThread]


@closed
class MessageError(TypedDict):
    """An error in the shape of Anthropic's API."""

    type: Literal["error"]
    error: MessageErrorDetails
    request_id: str
