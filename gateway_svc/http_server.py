"""The HTTP server: uvicorn, with our own handling of signals and logs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

_IDLE_S = 75.0  # longer than clients and proxies keep connections for their next request, so that they close first


class HttpServer(uvicorn.Server):
    """Serves an application until `should_exit` is set; then open answers have `drain_timeout_s` to end."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_connections: int,
        drain_timeout_s: float,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=max_connections,
                timeout_keep_alive=int(_IDLE_S),
                ssl_certfile=tls_cert,
                ssl_keyfile=tls_key,
                timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process."""
        yield
