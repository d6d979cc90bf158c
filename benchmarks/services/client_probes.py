"""Probes of an iteration's stages in a client's process: a response decoded, and its readers served.

The only file that reaches into the SDK for that.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.services.stage_spans import SpanLog
from quire.session import Session
from quire.v1 import inference_pb2 as pb


class Reads:
    """Time of each reader's last chunk; call `record_chunk` for every chunk."""

    def __init__(self) -> None:
        self.last_ns = 0

    def record_chunk(self, now_ns: int) -> None:
        self.last_ns = now_ns


@contextmanager
def probed_client(log: SpanLog, reads: Reads) -> Iterator[None]:
    """Put probes into the SDK; responses are numbered within one session."""
    take_response = Session._take_response
    number = taken_ns = 0

    def timed(session: Session, response: pb.SessionResponse) -> None:
        nonlocal number, taken_ns
        began_ns = time.perf_counter_ns()
        if number and reads.last_ns > taken_ns:
            log.add("read", number, taken_ns, reads.last_ns)
        take_response(session, response)
        number, taken_ns = number + 1, time.perf_counter_ns()
        log.add("dispatch", number, began_ns, taken_ns)

    setattr(Session, "_take_response", timed)  # noqa: B010 - mypy allows none other
    try:
        yield
    finally:
        setattr(Session, "_take_response", take_response)  # noqa: B010
