"""Readers of outputs, and cancellation of requests that have lost their readers.

A request is cancelled only after a grace period without any reader, and only if its client asked for that
(`on_disconnect`). Time in which our own event loop is blocked hardly counts: who comes back then is not heard yet.
"""

from collections.abc import Callable, Sequence
from functools import partial

import structlog

from common.waits import TimerInTurns
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.live_request import LiveRequest
from scheduler_svc.requests.live.output_stream import OutputStream, Subscription

log = structlog.get_logger()


class Readers:
    """Opens subscriptions. Once `closed`, as in our own shutdown, no grace period is started.

    A reader may come back from a scheduler that showed it more than the journal has: by relaxed delivery, or since the
    store has lost entries. It gets no token twice, and waits at its position for the tokens that are computed again.
    """

    def __init__(self, engine: Engine, *, grace_s: float) -> None:
        self.closed = False
        self._engine = engine
        self._grace_s = grace_s

    def subscribe(
        self, stream: OutputStream, from_positions: Sequence[int], notify: Callable[[Subscription], None]
    ) -> Subscription:
        """Open a reader's subscription, at a position per sample. Raises InvalidRequestError for an impossible one."""
        subscription = Subscription(stream, from_positions, notify, self._left)
        live = self._live_of(stream)
        if live is not None and live.abandonment is not None:
            live.abandonment.cancel()
            live.abandonment = None
        return subscription

    def start_grace_period(self, live: LiveRequest, *, at_least_s: float = 0.0) -> None:
        """Start the grace period of a request without readers."""
        if live.params.cancel_on_disconnect and live.ended_state is None and not self.closed:
            live.abandonment = TimerInTurns(max(self._grace_s, at_least_s), partial(self._abandon, live))

    def _left(self, stream: OutputStream) -> None:
        live = self._live_of(stream)
        if live is not None and not live.stream.subscriptions:
            self.start_grace_period(live)

    def _live_of(self, stream: OutputStream) -> LiveRequest | None:
        """Request of an output; None if it has ended: once its record has expired, its id may be another one's."""
        return self._engine.live.get(stream.accepted.request_id) if stream.finished is None else None

    def _abandon(self, live: LiveRequest) -> None:
        if self.closed:
            return
        log.info("request cancelled: no reader came back", request_id=live.request_id)
        self._engine.end(live, pb.REQUEST_STATE_CANCELLED)
