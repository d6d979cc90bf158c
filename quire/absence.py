"""What a client says of a server that does not answer, or that has forgotten what it had accepted."""

import re

import grpc

from quire.errors import NotLeaderError, RequestFailedError, UnavailableError

_BEFORE_THE_REASON = "Failed to connect to remote host: "  # gRPC names its targets before, we name ours
# Both resolvers of gRPC, the system's and c-ares, name the host again, and what they asked for.
_LOOKUP = re.compile(r"(?:address lookup|DNS resolution) failed for \S+: (?:C-ares status [^:]*: )?([^\[\]]+)")


def unreachable(address: str, error: grpc.aio.AioRpcError | None) -> UnavailableError:
    """Says that no server answers, where, and what to do about it."""
    details = (error.details() if error is not None else None) or "it closed the connection"
    lookup = _LOOKUP.search(details)
    why = lookup[1] if lookup is not None else details.rpartition(_BEFORE_THE_REASON)[2]
    return UnavailableError(f"no Quire server answers at {address} ({why}); start one with `quire serve MODEL`")


def leaderless(address: str, error: NotLeaderError) -> UnavailableError:
    """Says that servers answer, and that none of them leads."""
    return UnavailableError(f"no Quire server at {address} leads at the moment ({error.message}); come back soon")


def lost(request_id: str, num_tokens: int) -> RequestFailedError:
    """Says that a request ended with the server that had accepted it."""
    return RequestFailedError(
        f"request {request_id}, after {num_tokens} tokens of output: the server was started anew and no longer knows "
        "it; submit it again"
    )
