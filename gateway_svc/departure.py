"""Work for a client that may leave before it is answered."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway_svc.event_stream import wait_disconnected

_NOBODY_READS = 499  # as proxies log a client that has closed its connection


async def unless_departed(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer that the work returns; cancels the work when the client disconnects."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(wait_disconnected(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    return Response(status_code=_NOBODY_READS) if working.cancelled() else working.result()
