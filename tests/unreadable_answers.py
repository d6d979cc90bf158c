"""Answers that gRPC cannot read: it logs that, and gives the caller None instead of an error."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc


class Unreadable(grpc.GenericRpcHandler):
    """Answers some calls with bytes that are no message, as a bit that flips on the way can make of any."""

    def __init__(self, num_left: Counter[str]) -> None:
        """`num_left`: answers to give, by method."""
        self._num_left = num_left

    def service(self, handler_call_details: Any) -> Any:
        """Handler of a call; None: it is answered by others."""
        method = handler_call_details.method.rsplit("/", 1)[1]
        if not self._num_left[method]:
            return None
        self._num_left[method] -= 1
        return grpc.stream_stream_rpc_method_handler(self._answer)

    async def _answer(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"\xff"
