"""The line in the log about an HTTP call that has ended. Knows no body, no query, and of the headers the request's id.

Calls of probes and scrapes have no line: they would be most of the log, and why one fails is told elsewhere.
"""

import structlog
from starlette.datastructures import Headers
from starlette.types import Message, Scope

from gateway_svc.anthropic.errors import ID_HEADER as ANTHROPIC_ID_HEADER
from gateway_svc.key_check import OPEN_PATHS
from gateway_svc.openai.errors import ID_HEADER as OPENAI_ID_HEADER

_MOST_CHARS = 256  # of a path: whoever calls may not fill the log with one line

log = structlog.get_logger()


def log_call(scope: Scope, status: int, seconds: float, start: Message | None) -> None:
    """Write the line `call ended`, with the id by which the scheduler's line `request ended` is found.

    `seconds`: to the end of the answer; `start`: of the answer, None if there is none.
    """
    path: str = scope["path"]
    if path in OPEN_PATHS:
        return
    client = scope.get("client")
    headers = Headers(raw=[] if start is None else start["headers"])
    request_id = headers.get(OPENAI_ID_HEADER) or headers.get(ANTHROPIC_ID_HEADER)
    fields = {"request_id": request_id, "client": None if client is None else client[0]}
    log.info(
        "call ended",
        method=scope["method"],
        path=path if len(path) <= _MOST_CHARS else path[:_MOST_CHARS] + "…",
        status=status,
        total_ms=round(1000 * seconds, 3),
        **{name: value for name, value in fields.items() if value is not None},
    )
