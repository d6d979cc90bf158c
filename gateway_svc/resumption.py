"""Streams of events that a client resumes, by the id of the last event that it has had (Last-Event-ID).

The events of an output are the same whenever they are made, those of several outputs alternate as they come. So an id
has the number of events so far of each output, and a stream that resumes makes all of them again and leaves out those
that its reader has. Knows no API.
"""

from gateway_svc.api_error import ApiError, invalid
from gateway_svc.event_stream import with_id

MOST_OUTPUTS = 128  # of a stream with ids, each of which names them all
_END = "end"
_HEADER = "last-event-id"
_MOST_DIGITS = 10


class EventCounts:
    """Events so far of each output of one stream, and those that its reader has."""

    def __init__(self, num_outputs: int, last_event_id: str | None) -> None:
        """Raises ApiError if the id is of no event of such a stream."""
        self.is_resumed = last_event_id is not None
        self._has_end = last_event_id == _END
        self._counts = [0] * num_outputs
        self._known = list(self._counts)
        if last_event_id is not None and not self._has_end:
            parts = last_event_id.split(",")
            if len(parts) != num_outputs or not all(
                each.isascii() and each.isdigit() and len(each) <= _MOST_DIGITS for each in parts
            ):
                raise invalid(_HEADER, "give the id of an event of this stream")
            self._known = [int(each) for each in parts]

    def numbered(self, output: int, event: bytes) -> bytes:
        """The next event of an output, with its id; empty if the reader has it."""
        self._counts[output] += 1
        if self._has_end or self._counts[output] <= self._known[output]:
            return b""
        seen = map(max, self._counts, self._known)
        return with_id(",".join(map(str, seen)), event)

    def last(self, event: bytes) -> bytes:
        """The event after all outputs, with its id; empty if the reader has it."""
        return b"" if self._has_end else with_id(_END, event)

    def check_attached(self, is_attached: bool) -> None:
        """Raise ApiError if the reader has had events of a request that is not known any more."""
        if self.is_resumed and not is_attached:
            raise not_resumable()


def not_resumable() -> ApiError:
    """The refusal to go on with a request that began anew."""
    what = "the request of this Idempotency-Key is not known any more: repeat it without Last-Event-ID"
    return ApiError(409, what, param=_HEADER, code="not_resumable", is_final=True)


def event_counts(
    idempotency_key: str | None, last_event_id: str | None, num_outputs: int, *, streamed: bool
) -> EventCounts | None:
    """Counts for a stream that can be resumed, which needs a key; None for another one.

    Raises ApiError if it cannot, and an event of it is named.
    """
    is_resumable = streamed and idempotency_key is not None and num_outputs <= MOST_OUTPUTS
    if last_event_id is not None and not is_resumable:
        raise invalid(
            _HEADER,
            f"give stream: true and the Idempotency-Key as well, of at most {MOST_OUTPUTS} outputs",
        )
    return EventCounts(num_outputs, last_event_id) if is_resumable else None
