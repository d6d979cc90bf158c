"""Who reads a request's output, and what becomes of a request that nobody reads any more.

A reader that leaves decides nothing: the request may be cancelled only after a grace period without any reader, and
only if its client wanted that.
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.live_request import LiveRequest
from scheduler_svc.requests.live.output_stream import OutputStream, Subscription

log = structlog.get_logger()


class Readers:
    """Opens places in outputs. Once `closed`, as in our own shutdown, no grace period is started.

    Readers may come back from a scheduler that let them see what the journal does not have: by relaxed delivery, or
    since the store has lost it. They get nothing twice, and wait where they are for what is computed again.
    """

    def __init__(self, engine: Engine, *, grace_s: float) -> None:
        self.closed = False
        self._engine = engine
        self._grace_s = grace_s

    def subscribe(
        self, stream: OutputStream, from_positions: Sequence[int], notify: Callable[[Subscription], None]
    ) -> Subscription:
        """Opens a reader's place in an output, by sample. Raises InvalidRequestError for one that it cannot have."""
        subscription = Subscription(stream, from_positions, notify, self._left)
        live = self._engine.live.get(stream.accepted.request_id)
        if live is not None and live.abandonment is not None:
            live.abandonment.cancel()
            live.abandonment = None
        return subscription

    def watch(self, live: LiveRequest, *, at_least_s: float = 0.0) -> None:
        """Starts the grace period of a request without readers."""
        if live.params.cancel_on_disconnect and live.ended_state is None and not self.closed:
            live.abandonment = asyncio.get_running_loop().call_later(
                max(self._grace_s, at_least_s), self._abandon, live
            )

    def _left(self, stream: OutputStream) -> None:
        live = self._engine.live.get(stream.accepted.request_id)
        if live is not None and not live.stream.subscriptions:
            self.watch(live)

    def _abandon(self, live: LiveRequest) -> None:
        if self.closed:
            return
        log.info("request abandoned by its readers", request_id=live.request_id)
        self._engine.end(live, pb.REQUEST_STATE_CANCELLED)
