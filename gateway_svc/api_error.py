"""Refusals and failures of a call, made from errors of the SDK and of a body that does not validate.

Knows statuses, fields and codes, which are OpenAI's, and no shape of an answer.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quire.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    QuireError,
    RequestCancelledError,
    RequestExpiredError,
    RequestFailedError,
    RequestLostError,
    RetryableError,
    UnauthenticatedError,
    UnavailableError,
)

_KEY_REFUSED = "the scheduler refuses the API key of this gateway: its operator has to give both the same keys"

_STATUSES: tuple[tuple[type[QuireError], int, str, str], ...] = (  # the first match counts
    (InvalidRequestError, 400, "invalid_request_error", "invalid_value"),
    (NotFoundError, 404, "invalid_request_error", "not_found"),
    (AlreadyExistsError, 409, "invalid_request_error", "already_exists"),
    (FailedPreconditionError, 400, "invalid_request_error", "failed_precondition"),
    (OverloadedError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (UnavailableError, 503, "server_error", "service_unavailable"),
    (RequestCancelledError, 499, "server_error", "cancelled"),
    (RequestExpiredError, 504, "server_error", "deadline_exceeded"),
    (QuireError, 500, "server_error", "internal_error"),
)


# Ends of a request, which a repetition would not change, or would cost all of it again.
_FINAL = (AlreadyExistsError, RequestExpiredError, RequestFailedError)
TOO_LONG = "context_length_exceeded"  # code of a prompt, or of its output, that the context does not hold
_NAME = re.compile(r"^\w+")  # with which the path of a value begins
_KEY_HEADER = "idempotency-key"
_KEY_REUSED = (
    "this Idempotency-Key belongs to a request with another prompt or other parameters, or to one that was deleted: "
    "send another key, or the same request again to read its output"
)
_BOUND = re.compile(r"\bmax_tokens\b")  # keyword that descriptions of other fields name
_TYPES = frozenset({"bool", "float", "int", "str"})  # alternatives of a union, as pydantic names them in a place


class ApiError(Exception):
    """A refusal with its HTTP status.

    `param` is the field of the body that is wrong, `request_id` the id of a request that was submitted, `is_final` says
    that the same call would fail again: clients would repeat it by its status alone.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.request_id = request_id
        self.is_final = is_final

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer in every API."""
        found = {} if self.retry_after_s is None else {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}
        return found | ({"x-should-retry": "false"} if self.is_final else {})


def invalid(param: str, reason: str) -> ApiError:
    """The refusal of a field's value."""
    return ApiError(400, f"{param}: {reason}", param=param, code="invalid_value")


def from_quire(error: QuireError, names: Mapping[str, str], request_id: str | None = None) -> ApiError:
    """The error of a call to the SDK.

    Args:
        error: the error.
        names: names of the body's fields by the SDK's keywords, where they differ.
        request_id: id of the request, if it was submitted.
    """
    param = None
    if isinstance(error, UnauthenticatedError):  # the caller's own key was accepted
        error = QuireError(_KEY_REFUSED)
    if isinstance(error, InvalidRequestError):
        error = error.renamed(
            lambda path: _renamed(path, names),
            lambda description: _BOUND.sub(lambda found: names.get(found[0], found[0]), description),
        )
        param = error.violations[0].field if error.violations else None
    _, status, kind, code = next(each for each in _STATUSES if isinstance(error, each[0]))
    if isinstance(error, InvalidRequestError) and CONTEXT_LENGTH_EXCEEDED in (each.reason for each in error.violations):
        code = TOO_LONG
    message = error.message
    if isinstance(error, AlreadyExistsError) and request_id is not None:  # made of the key, else it is new
        message, param, code = _KEY_REUSED, _KEY_HEADER, "idempotency_key_reused"
    retry_after_s = error.retry_after_s if isinstance(error, RetryableError) else None
    return ApiError(
        status,
        message,
        kind=kind,
        param=param,
        code=code,
        retry_after_s=retry_after_s,
        request_id=request_id,
        is_final=isinstance(error, _FINAL) and not isinstance(error, RequestLostError),
    )


def _renamed(path: str, names: Mapping[str, str]) -> str:
    return _NAME.sub(lambda found: names.get(found[0], found[0]), path, count=1)


@contextmanager
def sdk_refusals(names: Mapping[str, str]) -> Iterator[None]:
    """Raise ApiError for what the SDK refuses; `names` as in `from_quire`."""
    try:
        yield
    except QuireError as error:
        raise from_quire(error, names) from error
    except (TypeError, ValueError) as error:
        raise ApiError(400, str(error), code="invalid_value") from error


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The error of a body that is no JSON, or whose fields are unknown, missing, of the wrong type or not supported.

    `errors` are those of pydantic, of which the deepest is told, since clients show one: of the alternatives of a
    union it is the one that fits best.
    """
    first = max(errors, key=lambda error: len(error["loc"]))
    where, *place = first["loc"]
    param = (_path(place) if where == "body" else str(place[0])) or None
    match first["type"]:
        case "json_invalid":
            return ApiError(400, f"The body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
        case "extra_forbidden":
            param = _member(_path(place[:-1]), str(place[-1]))  # whatever name it is
            return ApiError(400, f"Unrecognized request argument: {param}", param=param, code="unknown_parameter")
        case "missing" if param is None:
            return ApiError(400, "The body is missing: send JSON", code="missing_body")
        case "missing":
            message = f"Missing required parameter: '{param}'"
            return ApiError(400, message, param=param, code="missing_required_parameter")
        case "unsupported":
            return ApiError(400, f"{param}: {first['msg']}", param=param, code="unsupported_parameter")
        case _:
            reason = first["msg"].removeprefix("Value error, ")
            about = f"Invalid value for '{param}'" if param else "Invalid body"
            return ApiError(400, f"{about}: {reason}", param=param, code="invalid_value")


def _path(location: Sequence[int | str]) -> str:
    """`messages[0].content` for a place in the body; alternatives of a union are left out."""
    path = ""
    for each in location:
        if isinstance(each, int):
            path += f"[{each}]"
        elif each.isidentifier() and each not in _TYPES and not each[0].isupper():
            path = _member(path, each)
    return path


def _member(path: str, name: str) -> str:
    """The path of a member of the object at this path; of a long name its beginning."""
    return f"{path}.{name:.80}" if path else name[:80]
