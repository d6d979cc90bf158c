"""The HTTP server: uvicorn, with our own handling of signals and logs."""

import ssl
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from gateway_svc.http_connection import ConnectionRules, HttpConnection

SILENCE_S = 60.0  # within a request that has not come whole
IDLE_S = 75.0  # longer than clients and proxies keep connections for their next request, so that they close first


class HttpServer(uvicorn.Server):
    """Serves an application until `should_exit` is set; then open answers have `drain_timeout_s` to end."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_connections: int,
        drain_timeout_s: float,
        busy: ASGIApp,
        open_paths: Collection[str],
        silence_s: float = SILENCE_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Serve `app`, and on connections beyond the bound `busy` but for `open_paths`; `tls`: encrypted."""
        rules = ConnectionRules(max_connections=max_connections, busy=busy, open_paths=open_paths, silence_s=silence_s)
        connection: Any = partial(HttpConnection, rules=rules)
        config = uvicorn.Config(
            app,
            http=connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(IDLE_S),
            timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
        )
        config.load()
        config.ssl = tls
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process."""
        yield
