"""The process and the event loop that a client belongs to; elsewhere its calls would hang, so they are refused.

A fork has none of its parent's threads: neither that of a client's loop nor those of gRPC, which cannot be started in
it once the parent has used them. gRPC would try, so it is loaded here, before any other module of the SDK does.
"""

import asyncio
import os
import sys
from importlib import import_module
from typing import NoReturn

CLOSED = "the client is closed; make a new one"
_FORKED = (
    "this process was forked from one that has used a client, and gRPC would hang here: start it with "
    "multiprocessing's method spawn or forkserver, or use the first client after the fork"
)
_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


class ClientHome:
    """The process in which a client was made, and the event loop of its first call."""

    _grpc_process_id = 0  # of the process that used gRPC first; 0: none did

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_here(self) -> bool:
        """True in the process in which the client was made."""
        return self._process_id == os.getpid()

    @property
    def has_ended(self) -> bool:
        """True if the event loop of the first call is closed, and with it all that the client had open there."""
        return self._loop is not None and self._loop.is_closed()

    def check_process(self) -> None:
        """Raises RuntimeError in a fork of the process in which the client was made."""
        if not self.is_here:
            raise RuntimeError(_FORKED if self._grpc_process_id else "the client was made before a fork: make one here")

    def enter_loop(self) -> None:
        """Records that gRPC is used, and the loop that runs, if any.

        Raises RuntimeError in a fork of a process that had used gRPC, and in another loop than that of the first call.
        """
        here = os.getpid()
        ClientHome._grpc_process_id = self._grpc_process_id or here
        if self._grpc_process_id != here:
            raise RuntimeError(_FORKED)
        loop = _running_loop()
        self._loop = self._loop or loop
        if loop is not None and loop is not self._loop:
            raise RuntimeError("the client belongs to the event loop of its first call: make one for each loop")


def refuse_copy(original: object, instead: str) -> NoReturn:
    """Raises TypeError for what a copy, also by pickle and so to another process, would share or leave behind."""
    raise TypeError(f"{type(original).__name__} cannot be copied or pickled, since it has a connection: {instead}")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _load_grpc() -> None:
    """Loads gRPC without its handlers of forks, unless the environment has a word on them.

    Beside a client, which has threads in gRPC for asyncio, most forks find them busy, and a line on standard error says
    so. Where one does not, the handlers start gRPC's poller in the child, which aborts it within moments, whatever it
    does. gRPC reads the variable as it is loaded: where that has happened before, only the environment can.
    """
    if "grpc" in sys.modules or _FORK_SUPPORT in os.environ:
        return
    os.environ[_FORK_SUPPORT] = "0"
    try:
        import_module("grpc")
    finally:
        os.environ.pop(_FORK_SUPPORT, None)  # programs that this one starts have their own gRPC


_load_grpc()
