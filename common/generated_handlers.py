"""Handlers that generated code registers at a server, collected instead of served.

gRPC gives handlers that are registered by name precedence over generic ones from 1.84 on, and knew no others for
asyncio before. Where generic handlers have to come before the generated ones, those are added as generic ones, too.
"""

from collections.abc import Sequence
from typing import Any


class GeneratedHandlers:
    """Collector of generic handlers; generated code takes it for a server."""

    def __init__(self) -> None:
        self.handlers: list[Any] = []

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Add the handlers of one service."""
        self.handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Ignore the same handlers by name, for servers that look them up so."""
