"""Exceptions of services and SDK, and their gRPC statuses.

One table for all services and the SDK: a service raises, `rpc.EdgeInterceptor` answers with the status, the SDK
turns the status back into the same exception.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "quire"
MAX_RETRY_AFTER_S = 300.0  # longer delays of a server are cut to this
M = TypeVar("M", bound=Message)
_LEADER = "leader"  # in the metadata of an ErrorInfo
_VERSION = "version"
_MOST_DIGITS = 20

CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"  # reason of a violation: prompt and output do not fit the context


class QuireError(Exception):
    """Base of all refusals and failures that a caller can see. The message says what happened and what to do."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def public_message(self) -> str:
        """Message that a service tells its callers; `message` may tell its log more."""
        return self.message


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One thing wrong with a request, and what to change.

    `field` is its path in the message on the wire; in what the SDK raises, the keyword that the caller gave.
    `reason` names what callers act on, as CONTEXT_LENGTH_EXCEEDED; empty: nothing of that kind.
    """

    field: str
    description: str
    reason: str = ""


class InvalidRequestError(QuireError):
    """The request can never be served as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    def __init__(self, message: str, violations: Sequence[FieldViolation] = ()) -> None:
        super().__init__(message)
        self.violations = tuple(violations)

    @classmethod
    def of(cls, violations: Sequence[FieldViolation]) -> "InvalidRequestError":
        """One error for all violations."""
        return cls(_listed(violations), violations)

    def renamed(
        self, name_of: Callable[[str], str], in_descriptions: Callable[[str], str] = lambda description: description
    ) -> "InvalidRequestError":
        """The same error with other names for its fields, and for those that its descriptions name."""
        violations = [
            replace(each, field=name_of(each.field), description=in_descriptions(each.description))
            for each in self.violations
        ]
        listed = _listed(self.violations)
        if not listed or not self.message.startswith(listed):
            return InvalidRequestError(self.message, violations)
        return InvalidRequestError(_listed(violations) + self.message[len(listed) :], violations)


def _listed(violations: Sequence[FieldViolation]) -> str:
    return "; ".join(f"{each.field}: {each.description}" for each in violations)


class NotFoundError(QuireError):
    """No such request."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class AlreadyExistsError(QuireError):
    """The name, of a request or a pin, belongs to another one."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "REQUEST_ID_IN_USE"


class UnauthenticatedError(QuireError):
    """The server asks for an API key, and the caller sent none that it knows."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class FailedPreconditionError(QuireError):
    """The system is not in the state that the call needs, and repeating the call will not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "FAILED_PRECONDITION"


class NotLeaderError(FailedPreconditionError):
    """The scheduler does not lead; `leader` is the address of the one that does, if it is known."""

    reason = "NOT_LEADER"

    def __init__(self, message: str, leader: str | None = None) -> None:
        super().__init__(message)
        self.leader = leader


class RetryableError(QuireError):
    """Not now: come back after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OverloadedError(RetryableError):
    """The queue is full, or memory is promised to others."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"


class UnavailableError(RetryableError):
    """The service, or one that it needs, is not there."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class DataLossError(QuireError):
    """A message was damaged in transit; nothing in it is used."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "DATA_LOSS"


class ShardsChangedError(UnavailableError):
    """The shard does not take this request now, since the number of shards changes. The SDK finds the one that does.

    `version`: of the number of shards that the server knows; 0: it did not say.
    """

    reason = "SHARDS_CHANGED"

    def __init__(self, message: str, retry_after_s: float = 0.1, *, version: int = 0) -> None:
        super().__init__(message, retry_after_s)
        self.version = version


class SlowReaderError(UnavailableError):
    """The reader of a stream read nothing for too long; it may attach again and continue from its position."""

    reason = "SLOW_READER"


class RequestCancelledError(QuireError):
    """The request was cancelled, or its reader was closed before its end."""

    code = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"


class RequestExpiredError(QuireError):
    """The request's deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class RequestFailedError(QuireError):
    """The server accepted the request and could not finish it."""

    code = grpc.StatusCode.INTERNAL
    reason = "REQUEST_FAILED"


class RequestLostError(RequestFailedError):
    """The server that accepted the request has lost it, as one whose store is its own memory does by a restart.

    Nothing of it goes on anywhere: it may be submitted again.
    """


_BY_CODE: dict[int, type[QuireError]] = {
    kind.code.value[0]: kind
    for kind in (
        InvalidRequestError,
        NotFoundError,
        AlreadyExistsError,
        FailedPreconditionError,
        UnauthenticatedError,
        OverloadedError,
        UnavailableError,
        DataLossError,
        RequestCancelledError,
        RequestExpiredError,
        RequestFailedError,
    )
}


def to_status(error: QuireError) -> status_pb2.Status:
    """The error as google.rpc.Status with its details."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if isinstance(error, NotLeaderError) and error.leader is not None:
        info.metadata[_LEADER] = error.leader
    if isinstance(error, ShardsChangedError):
        info.metadata[_VERSION] = str(error.version)
    details = [_any(info)]
    if isinstance(error, InvalidRequestError) and error.violations:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(
                field=each.field, description=each.description, reason=each.reason
            )
            for each in error.violations
        ]
        details.append(_any(error_details_pb2.BadRequest(field_violations=violations)))
    if isinstance(error, RetryableError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(_any(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=error.code.value[0], message=error.public_message, details=details)


def from_status(status: status_pb2.Status) -> QuireError:
    """The error that the status stands for; QuireError itself for faults of a server and codes that are not ours."""
    kind = _BY_CODE.get(status.code, QuireError)
    if issubclass(kind, InvalidRequestError):
        bad_request = _detail(status, error_details_pb2.BadRequest()) or error_details_pb2.BadRequest()
        violations = [
            FieldViolation(each.field, each.description, each.reason) for each in bad_request.field_violations
        ]
        return kind(status.message, violations)
    if kind in (UnavailableError, FailedPreconditionError, RequestFailedError):
        info = _detail(status, error_details_pb2.ErrorInfo()) or error_details_pb2.ErrorInfo()
        if kind is UnavailableError and info.reason == ShardsChangedError.reason:
            return ShardsChangedError(status.message, _retry_after_s(status), version=_version_of(info))
        if kind is FailedPreconditionError and info.reason == NotLeaderError.reason:
            return NotLeaderError(status.message, info.metadata.get(_LEADER))
        if kind is RequestFailedError and info.reason != RequestFailedError.reason:  # INTERNAL is said of any fault
            return QuireError(status.message)
    if issubclass(kind, RetryableError):
        return kind(status.message, _retry_after_s(status))
    return kind(status.message)


def _retry_after_s(status: status_pb2.Status) -> float:
    retry_info = _detail(status, error_details_pb2.RetryInfo())
    if retry_info is None:
        return 1.0
    return min(max(0.0, float(retry_info.retry_delay.ToMilliseconds()) / 1000), MAX_RETRY_AFTER_S)


def _version_of(info: error_details_pb2.ErrorInfo) -> int:
    text = info.metadata.get(_VERSION, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS else 0


def _detail(status: status_pb2.Status, empty: M) -> M | None:
    """The first readable detail of the kind of `empty`, which it fills; None if the status has none."""
    for detail in status.details:
        try:
            if detail.Unpack(empty):
                return empty
        except DecodeError:
            empty.Clear()
    return None


def _any(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
