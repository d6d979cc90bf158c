"""Calls whose waiter has left: they end by themselves, for a server cuts a connection that cancels many.

A gateway has one connection for all of its users, with the stream of their requests. Who leaves while a short call is
under way must not cost the others that stream. Knows no wire.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

MOST = 256  # that end by themselves at a time; beyond it they are cancelled

Response = TypeVar("Response")


class AbandonedCalls:
    """Calls of one connection that nobody waits for any more. Belongs to one event loop."""

    def __init__(self) -> None:
        self._calls: set[asyncio.Future[Any]] = set()

    async def wait(self, call: Awaitable[Response]) -> Response:
        """The answer to a call, which goes on if this is cancelled, unless too many do."""
        answer: asyncio.Future[Response] = asyncio.ensure_future(call)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if len(self._calls) < MOST:
                self._calls.add(answer)
                answer.add_done_callback(self._forget)
            else:
                answer.cancel()
            raise

    def close(self) -> None:
        """Cancel those that are under way."""
        for each in self._calls:
            each.cancel()

    def _forget(self, call: "asyncio.Future[Any]") -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # nobody else asks for it
