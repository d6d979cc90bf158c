"""`/metrics`: the figures of the deployment, asked of its scheduler, and those of this process.

Routers of requests scrape many times a second, so the text is kept for a moment; that of the histograms, which is most
of the work and is read over minutes, for longer.
"""

import asyncio
import time
from collections.abc import Iterator

from prometheus_client.core import Metric
from starlette.responses import Response

import quire
from common.engine_metrics import engine_histograms, engine_numbers
from common.metric_families import CONTENT_TYPE, gauges, text_of
from gateway_svc.http_figures import HttpFigures

_ASK_S = 3.0  # requests wait longer for a scheduler
_KEPT_S = 0.5
_HISTOGRAMS_KEPT_S = 2.0


class Metrics:
    """Answers scrapes. The figures of the deployment are the same from each of its gateways."""

    def __init__(self, client: quire.AsyncClient, figures: HttpFigures) -> None:
        self._client = client
        self._figures = figures
        self._text = self._histograms = b""
        self._made_s = self._histograms_made_s = float("-inf")

    async def answer(self) -> Response:
        """Answer with all figures; without those of the deployment while no scheduler answers."""
        if time.monotonic() - self._made_s >= _KEPT_S:
            stats = await self._ask()
            self._text = text_of(self._numbers(stats)) + self._histogram_text(stats)
            self._made_s = time.monotonic()
        return Response(self._text, media_type=CONTENT_TYPE)

    async def _ask(self) -> quire.Stats | None:
        try:
            async with asyncio.timeout(_ASK_S):
                return await self._client.stats()
        except (quire.QuireError, TimeoutError):
            return None

    def _histogram_text(self, stats: quire.Stats | None) -> bytes:
        if stats is None:
            return b""
        now_s = time.monotonic()
        if now_s - self._histograms_made_s >= _HISTOGRAMS_KEPT_S:
            self._histograms, self._histograms_made_s = text_of(engine_histograms(stats)), now_s
        return self._histograms

    def _numbers(self, stats: quire.Stats | None) -> Iterator[Metric]:
        about = "1 if a scheduler that leads answered."
        yield gauges("quire_scheduler_up", about, [({}, stats is not None)])
        if stats is not None:
            yield from engine_numbers(stats)
        yield from self._figures.families()
