"""Pins in the journal: written when a worker first has the prefix, restated, and removed when it is unpinned.

Knows no worker and no client; `PrefixKeeper` decides when to write and remove a pin.
"""

import asyncio
from typing import Any

from quire.errors import UnavailableError
from quire.v1 import journal_pb2
from scheduler_svc.journal.journal import Journal
from scheduler_svc.requests.prefixes.prefix_pin import PrefixPin

TIMEOUT_S = 5.0
UNSURE_S = 60.0  # in which a client may ask again whether its pin is gone


class PinJournal:
    """One per scheduler. Each pin is a key of the journal's needed entries."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._leaving: dict[tuple[str, str], PrefixPin] = {}  # by tenant and name: removed, perhaps not durably

    def write(self, prefix: PrefixPin) -> None:
        """Write a pin; `prefix.durable` is set when the journal has it."""
        self._journal.append(pins=[prefix.to_change()], needed={prefix: prefix.restate}, on_durable=prefix.durable.set)

    def remove_pin(self, prefix: PrefixPin) -> None:
        """Write that a pin is removed; `prefix.gone` is set when the journal has that."""
        self._leaving[prefix.tenant, prefix.name] = prefix

        def gone() -> None:
            self._journal.forget(prefix if prefix.journaled is None else prefix.journaled)
            prefix.gone.set()
            if prefix.is_unsure:
                asyncio.get_running_loop().call_later(UNSURE_S, self._forget_removed, prefix)
            else:
                self._forget_removed(prefix)

        change = journal_pb2.PinChange(tenant=prefix.tenant, name=prefix.name, unpinned=True)
        self._journal.append(pins=[change], on_durable=gone)

    async def until_gone(self, tenant: str, name: str) -> bool:
        """Return when the removal of a pin is durable. False: no pin of this name is being removed.

        Raises UnavailableError if the store does not answer; a client that asks again learns what happened.
        """
        prefix = self._leaving.get((tenant, name))
        if prefix is None:
            return False
        try:
            await self.until(prefix.gone)
        except UnavailableError:
            prefix.is_unsure = True
            raise
        self._forget_removed(prefix)
        return True

    def _forget_removed(self, prefix: PrefixPin) -> None:
        key = (prefix.tenant, prefix.name)
        if self._leaving.get(key) is prefix:
            del self._leaving[key]

    async def until(self, durable: asyncio.Event) -> None:
        """Wait for an entry. Raises UnavailableError if the store does not answer; it may become durable later."""
        if durable.is_set():
            return
        waiting: asyncio.Future[Any] = asyncio.ensure_future(durable.wait())
        try:
            await asyncio.wait(
                [waiting, self._journal.health.trouble], timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if not durable.is_set():
            raise UnavailableError("the journal's store does not answer; ask again, to see what became of it", 1.0)
