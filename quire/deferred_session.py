"""The session of one request whose shard is not known yet: it is opened when the shard is, and can be given up before.

Knows nothing of shards: whoever makes it says how the session is found.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from quire.errors import QuireError, RequestCancelledError
from quire.open_request import OpenRequest
from quire.session import Session
from quire.session_entry import Entry


class DeferredSession:
    """The session of one request whose shard is not known yet; from then on, that of its shard."""

    def __init__(
        self,
        finding: Coroutine[Any, Any, Session],
        entry: Entry,
        on_done: "Callable[[DeferredSession], None]",
    ) -> None:
        """`finding` returns the session, `on_done` is called when it is known or wanted no more."""
        self._entry: Entry | None = entry  # until it is that session's: who knows where requests are keeps none of them
        self._session: Session | None = None
        self._task = asyncio.get_running_loop().create_task(self._open(finding), name="quire-deferred")

        def end(_: object) -> None:
            finding.close()  # it never began if this was given up at once
            on_done(self)

        self._task.add_done_callback(end)

    def cancel(self, request: OpenRequest) -> None:
        """Cancels the request; see `Session.cancel`."""
        if self._session is not None:
            self._session.cancel(request)
        else:
            self._end(RequestCancelledError(f"request {request.request_id} was cancelled by its reader"))

    def detach(self, request: OpenRequest) -> None:
        """Stops reading the request; see `Session.detach`."""
        if self._session is not None:
            self._session.detach(request)
        else:
            self.close()

    def catch_up(self, request: OpenRequest) -> None:
        """Attaches again from the reader's position; see `Session.catch_up`."""
        if self._session is not None:
            self._session.catch_up(request)

    def close(self) -> None:
        """Gives up a request that was not sent yet."""
        if self._entry is not None:
            self._end(RequestCancelledError(f"the reader of request {self._entry.request.request_id} was closed"))

    async def _open(self, finding: Coroutine[Any, Any, Session]) -> None:
        try:
            session = await finding
            assert self._entry is not None, "who gives it up cancels this task"
            session.open(self._entry)
        except QuireError as error:
            self._fail(error)
        except Exception as error:
            self._fail(QuireError(f"the request was not sent: {error!r}"))
            raise
        else:
            self._session = session
        finally:
            self._entry = None

    def _end(self, error: QuireError) -> None:
        self._fail(error)
        self._entry = None
        self._task.cancel()

    def _fail(self, error: QuireError) -> None:
        if self._entry is not None:
            self._entry.request.fail(error)
