"""Limit of open files: raised as far as connections need and the system allows; fewer connections where it is lower.

A process without a file left can answer nobody, not even with the refusal that clients understand. Knows no
connection.
"""

import resource

import structlog
from grpc.aio import init_grpc_aio

RESERVE = 64  # for logs, pipes, listeners, and connections of our own
_MOST = 1 << 16  # for a number of connections that has no bound

log = structlog.get_logger()


def allow_connections(most: int, *, option: str) -> int:
    """The number of connections that may be open at once: `most`, or what the limit of open files leaves for them.

    0 is no bound of `most`; `option` sets it.
    """
    wanted = (most or _MOST) + RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return most
    allowed = wanted if hard == resource.RLIM_INFINITY else max(soft, min(hard, wanted))
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return most
    possible = max(1, allowed - RESERVE)
    if most:
        log.warning(
            f"fewer connections than {option}: the limit of open files is lower",
            connections=possible,
            files=allowed,
            fix=f"raise the limit (ulimit -n) to {wanted}, or lower {option}",
        )
    return possible


def open_files_of_grpc() -> None:
    """Let gRPC open its own files now: it ends a process that has none left for them at its first call."""
    init_grpc_aio()
