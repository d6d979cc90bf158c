"""Errors of a client whose server does not answer, does not lead, or no longer knows a request."""

import re

import grpc

from quire.errors import FailedPreconditionError, NotLeaderError, QuireError, RequestLostError, UnavailableError
from quire.rpc import PUBLIC_MESSAGE_BYTES, error_of, server_error_of

_BEFORE_THE_REASON = "Failed to connect to remote host: "  # gRPC names its targets before it; we name ours
# Both resolvers of gRPC, the system's and c-ares, repeat the host and the kind of record that they asked for.
_LOOKUP = re.compile(r"(?:address lookup|DNS resolution) failed for \S+: (?:C-ares status [^:]*: )?([^\[\]]+)")


# What gRPC says of a server that answers in another way than the client asks, and what to do about it.
_MISFITS = {
    "http1.x server": "it speaks HTTP/1, as a gateway does: give the port of gRPC, 7847 unless "
    "`--listen` says otherwise",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not to be trusted by the roots that tls_root or "
    "QUIRE_TLS_ROOT names",
    "Hostname Verification Check failed": "its certificate has another name: give that as tls_server_name, or set "
    "QUIRE_TLS_SERVER_NAME",
    "http2 header with status: 413": "a proxy on the way takes no request, or no stream, of that size: raise its bound "
    "(`client_max_body_size 0` of nginx)",
    "WRONG_VERSION_NUMBER": "it has no TLS: leave out tls_root and QUIRE_TLS_ROOT",
}
_SILENT = "it takes requests and is silent; a proxy on the way must pass on both directions of a stream as they come"
_TOO_LARGE = "message larger than max"  # says gRPC on either side of what it does not send or take
_CLOSED = "Socket closed"  # a server with TLS says no more to a client without, nor does a full one


def unreachable_error(address: str, error: grpc.aio.AioRpcError | None, *, is_silent: bool = False) -> UnavailableError:
    """The error for addresses at which no server answers, or one that refuses the client.

    `is_silent`: without an error the call had no answer.
    """
    if error is None and is_silent:
        return UnavailableError(f"the server at {address} does not answer: {_SILENT}")
    said = server_error_of(error) if error is not None else None
    if said is not None:
        return UnavailableError(f"the server at {address} refuses at the moment: {said.message}")
    details = (error.details() if error is not None else None) or "it closed the connection"
    for sign, misfit in _MISFITS.items():
        if sign in details:
            return UnavailableError(f"the server at {address} does not answer: {misfit}")
    if details.endswith(_CLOSED):
        closed = (
            "it closed the connection: if it has TLS, give tls_root, or set QUIRE_TLS_ROOT; "
            "if not, it may have as many connections as its max_connections allows"
        )
        return UnavailableError(f"the server at {address} does not answer: {closed}")
    lookup = _LOOKUP.search(details)
    why = lookup[1] if lookup is not None else details.rpartition(_BEFORE_THE_REASON)[2]
    return UnavailableError(f"no Quire server answers at {address} ({why}); start one with `quire serve MODEL`")


def said_error(address: str, error: grpc.aio.AioRpcError) -> QuireError:
    """The error that a server answered with; of a call that it does not know, what may be the reason."""
    if error.code() is not grpc.StatusCode.UNIMPLEMENTED or server_error_of(error) is not None:
        return error_of(error)
    return QuireError(
        f"the server at {address} does not know this call ({error.details()}): it is a scheduler of an earlier "
        "version, or none, as on the port of a worker"
    )


def too_large_answer(address: str, error: grpc.aio.AioRpcError) -> FailedPreconditionError | None:
    """The error for an answer that no message holds; None: it is another one. Asking again would not help."""
    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or _TOO_LARGE not in (error.details() or ""):
        return None
    return FailedPreconditionError(
        f"the answer of the server at {address} is larger than the {PUBLIC_MESSAGE_BYTES >> 20} MiB that a message may "
        "have: ask for less, and read a request with so much output by `attach`"
    )


def no_leader_error(address: str, error: NotLeaderError) -> UnavailableError:
    """The error for servers that answer, while none of them leads."""
    return UnavailableError(f"no Quire server at {address} leads at the moment ({error.message}); try again soon")


def lost_request_error(request_id: str, num_tokens: int) -> RequestLostError:
    """The error for a request that ended with the server that had accepted it."""
    return RequestLostError(
        f"request {request_id}, after {num_tokens} tokens of output: the server was restarted and no longer "
        "knows it; submit it again"
    )
