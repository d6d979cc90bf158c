"""A small HTTP listener for `/metrics`, for processes that have no other HTTP.

It answers on threads of its own; what it shows is read on the event loop, which owns it. Every path is the same, and
nothing is asked of the caller: it is for a network that may see the figures.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.types import WSGIApplication

from prometheus_client import start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.metric_families import CONTENT_TYPE
from quire.listening import ListenError

_READ_TIMEOUT_S = 5.0  # for the event loop to be free


def listen_for_scrapes(listen: str, read: Callable[[], Iterable[Metric]]) -> str:
    """Serve until the process ends. Returns the address that is bound, host:port.

    Args:
        listen: host:port; port 0 takes any free one.
        read: returns the families; called on the running event loop, and what it returns is used on another thread.

    Raises ListenError.
    """
    host, _, port = listen.rpartition(":")
    try:
        server, _ = start_http_server(int(port), host.strip("[]"), _LoopCollector(asyncio.get_running_loop(), read))
    except (OSError, OverflowError) as error:
        message = f"cannot listen on {listen} for metrics: {error}; choose another with --metrics-listen host:port"
        raise ListenError(message) from error
    server.set_app(_in_text_format(server.get_app()))
    return f"{host}:{server.server_port}"


def _in_text_format(app: Any) -> WSGIApplication:
    """The application of prometheus_client without its choices: all families in `CONTENT_TYPE`.

    Its OpenMetrics, which Prometheus 2 asks for, puts `_` for the colons of vLLM's names.
    """

    def answer(environ: Any, start_response: Any) -> Any:
        return app({**environ, "HTTP_ACCEPT": CONTENT_TYPE, "QUERY_STRING": ""}, start_response)

    return answer


class _LoopCollector(Collector):
    def __init__(self, loop: asyncio.AbstractEventLoop, read: Callable[[], Iterable[Metric]]) -> None:
        self._loop = loop
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return asyncio.run_coroutine_threadsafe(self._on_loop(), self._loop).result(_READ_TIMEOUT_S)

    async def _on_loop(self) -> Iterable[Metric]:
        return self._read()
