"""Reads of records, batched: while one read is in flight, the next one gathers ids.

A store that syncs its file on every write answers nobody meanwhile, so that reads one after the other would take a
sync each, and a burst of newcomers seconds. Knows no commands and no keys.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from common.native_faults import CONTROL_FLOW

MAX_AT_ONCE = 500

ReadMany = Callable[[Sequence[str]], Awaitable[Sequence[bytes | None]]]


class RecordReads:
    """Owned by the loop's thread."""

    def __init__(self, read_many: ReadMany) -> None:
        """`read_many` returns the records of so many ids, in their order."""
        self._read_many = read_many
        self._waiting: dict[str, asyncio.Future[bytes | None]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def get(self, request_id: str) -> bytes | None:
        """Read one record. Raises the errors of `read_many`."""
        record = self._waiting.get(request_id)
        if record is None:
            record = self._waiting[request_id] = asyncio.get_running_loop().create_future()
            record.add_done_callback(_look_at)
            if self._reading is None:
                self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(record)  # others may wait for it too

    def close(self) -> None:
        """Stop reading; waiting callers are cancelled."""
        if self._reading is not None:
            self._reading.cancel()
        for record in self._waiting.values():
            record.cancel()

    async def _read(self) -> None:
        try:
            while self._waiting:
                request_ids = list(self._waiting)[:MAX_AT_ONCE]
                records = [self._waiting.pop(request_id) for request_id in request_ids]
                try:
                    payloads = await self._read_many(request_ids)
                except CONTROL_FLOW:
                    for record in records:
                        record.cancel()
                    raise
                except BaseException as error:
                    for record in records:
                        record.set_exception(error)
                else:
                    for record, payload in zip(records, payloads, strict=True):
                        record.set_result(payload)
        finally:
            self._reading = None


def _look_at(record: "asyncio.Future[bytes | None]") -> None:
    """Retrieve the error, which concerns no caller if none waits any more."""
    if not record.cancelled():
        record.exception()
