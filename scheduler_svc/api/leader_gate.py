"""In front of the services that only a leader has: while this process does not lead, each call is told who does.

Knows services by their names alone.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from common.errors import NotLeaderError


class LeaderGate(grpc.GenericRpcHandler):
    """Shut until `open`. Put into a server once; what stands behind the gate is added to `services`."""

    def __init__(self, services: Sequence[str]) -> None:
        """`services` are the full names of those that stand behind it."""
        self.services: Any = _Handlers()  # generated code takes it for a server
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._is_open = False
        self._leader: str | None = None

    def open(self) -> None:
        """From now on this process leads."""
        self._is_open = True

    def close(self, leader: str | None) -> None:
        """From now on it does not; calls that have begun go on."""
        self._is_open = False
        self._leader = leader

    def note_leader(self, leader: str | None) -> None:
        """Keeps the address that calls are told; None: nobody leads."""
        self._leader = leader

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call; None if its service is none of ours."""
        if not handler_call_details.method.startswith(self._prefixes):
            return None
        if not self._is_open:
            return grpc.stream_stream_rpc_method_handler(self._refuse)  # a refusal has the same form for every method
        found = (each.service(handler_call_details) for each in self.services.handlers)
        return next((handler for handler in found if handler is not None), None)

    async def _refuse(self, requests: AsyncIterator[bytes], context: Any) -> None:
        where = f"; {self._leader} does" if self._leader is not None else ", and no other is known to lead just now"
        raise NotLeaderError(f"this scheduler does not lead{where}", self._leader)


class _Handlers:
    """What generated code registers."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Takes the handlers of one service."""
        self.handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """The same handlers again, for servers that look them up by name."""
