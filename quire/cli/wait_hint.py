"""Hints on standard error about what a request waits for, until its first output."""

import threading
from collections.abc import Callable

import quire
from quire.cli.output import err

HINT_EVERY_S = 3.0


class WaitHint:
    """Asks the server periodically, in a thread of its own, until there is output; prints only changes."""

    def __init__(self, client: quire.Client, request_id: str, every_s: float = HINT_EVERY_S) -> None:
        self._client = client
        self._request_id = request_id
        self._every_s = every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="quire-wait-hint", daemon=True)

    @property
    def stop(self) -> Callable[[], None]:
        """Ends the hints; repeating is harmless."""
        return self._is_over.set

    def __enter__(self) -> "WaitHint":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()

    def _watch(self) -> None:
        said: str | None = None
        while not self._is_over.wait(self._every_s):
            try:
                waiting_for = self._client.get(self._request_id).waiting_for
            except (quire.QuireError, RuntimeError):  # the request's own stream reports the error
                continue
            if waiting_for is not None and waiting_for != said and not self._is_over.is_set():
                said = waiting_for
                err.print(f"quire: request {self._request_id} waits for {waiting_for}", markup=False)
