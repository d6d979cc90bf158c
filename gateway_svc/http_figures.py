"""Figures of this process's own HTTP calls: how many, how long, and how many are open. Knows no body and no scheduler.

Several gateways may share a port, and a scrape reaches one of them: each labels its figures with its process.
"""

import os
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.metric_families import process_families

_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_NO_ROUTE = "none"  # one label for all unknown paths: whoever calls may not make labels
_CLIENT_CLOSED_REQUEST = 499
_INTERNAL_ERROR = 500

# Called with a call's scope, its status, the seconds to the end of its answer, and the answer's start if there is one.
ReportCall = Callable[[Scope, int, float, Message | None], None]


class HttpFigures:
    """Counters of one process, by route, method and class of status."""

    def __init__(self) -> None:
        self.process = str(os.getpid())
        self._registry = CollectorRegistry()
        route = ("process", "handler", "method")
        self._calls = Counter("http_requests", "Calls that ended.", (*route, "status"), registry=self._registry)
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Seconds from a call's headers to the end of its answer.",
            route,
            registry=self._registry,
            buckets=_BUCKETS_S,
        )
        self._open = Gauge("quire_http_open_calls", "Calls that are open.", ("process",), registry=self._registry)
        self.open = self._open.labels(self.process)

    def record(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Record a call that has ended."""
        self._calls.labels(self.process, handler, method, f"{status // 100}xx").inc()
        self._seconds.labels(self.process, handler, method).observe(seconds)

    def families(self) -> Iterable[Metric]:
        """Figures of HTTP, with CPU time, memory and files of the process."""
        for family in self._registry.collect():
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
            yield family
        yield from process_families({"process": self.process})


class MeasuredCalls:
    """Middleware around the whole application that records each call, and reports it where a reporter is given."""

    def __init__(self, app: ASGIApp, *, figures: HttpFigures, report: ReportCall | None) -> None:
        self._app = app
        self._figures = figures
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_CLOSED_REQUEST  # unless an answer begins
        start: Message | None = None
        began_s = time.perf_counter()

        async def observed(message: Message) -> None:
            nonlocal status, start
            if message["type"] == "http.response.start":
                status, start = message["status"], message
            await send(message)

        self._figures.open.inc()
        try:
            await self._app(scope, receive, observed)
        except Exception:
            status = _INTERNAL_ERROR
            raise
        finally:
            self._figures.open.dec()
            route = scope.get("route")
            handler = _NO_ROUTE if route is None else route.path
            method = _NO_ROUTE if route is None else scope["method"]
            seconds = time.perf_counter() - began_s
            self._figures.record(handler, method, status, seconds)
            if self._report is not None:
                self._report(scope, status, seconds, start)
