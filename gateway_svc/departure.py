"""Work for a client that may leave before it is done."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from common.waits import end_tasks

T = TypeVar("T")

_CLIENT_CLOSED_REQUEST = 499  # as proxies log it


async def unless_departed(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work; None, and the work is cancelled, if the client disconnects before.

    The request's body has been read from `receive`.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_wait_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(working, leaving)
    return None if working.cancelled() else working.result()


async def answer_unless_departed(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer that the work returns, unless the client leaves before; nobody reads the other one."""
    answer = await unless_departed(request.receive, work)
    return Response(status_code=_CLIENT_CLOSED_REQUEST) if answer is None else answer


async def _wait_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
