"""Turns of owners at work that is done one after another: one with much of it keeps no other waiting.

Of each owner one has its turn at a time, in the order in which they came. Knows no tenants, and not the work.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class OwnerTurns:
    """One for each thread that does such work. Keeps nothing of an owner without any."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Lock] = {}  # by owner, of those with work
        self._num_works: Counter[str] = Counter()  # by owner

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for what the owner has begun to wait for before, and hold its turn inside."""
        self._num_works[owner] += 1
        try:
            async with self._turns.setdefault(owner, asyncio.Lock()):
                yield
        finally:
            self._num_works[owner] -= 1
            if not self._num_works[owner]:
                del self._num_works[owner], self._turns[owner]
