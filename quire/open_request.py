"""One open request of a client: a bounded buffer that the session fills and a stream reads.

The session holds it from its submission until it has ended or was detached; its stream until it is read. Resuming
needs positions only: `next_positions` has, for each sample, the first position that was not received.
Knows no wire and no clock.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from quire.errors import QuireError
from quire.results import Accepted, Chunk, Outcome

MAX_SAMPLES = 128  # most that a request may ask for
MAX_POSITION = 2**31 - 1  # longer than any context


class OpenRequest:
    """A request and its output that was received but not read."""

    # Who reads hundreds of streams touches each once a step: most of the cost is what is not in the processor's caches.
    __slots__ = (
        "__weakref__",
        "_buffer_tokens",
        "_chunks",
        "_ended_samples",
        "_num_buffered",
        "_on_arrival",
        "_positions",
        "_waiters",
        "accepted",
        "error",
        "is_behind",
        "outcome",
        "request_id",
    )  # fmt: skip

    def __init__(self, request_id: str, *, from_positions: Sequence[int], buffer_tokens: int) -> None:
        self.request_id = request_id
        self._positions = dict(enumerate(from_positions))  # by sample, of those not at their beginning
        self.accepted: Accepted | None = None
        self.outcome: Outcome | None = None
        self.error: QuireError | None = None
        # True if output was dropped because the buffer was full; it is fetched from next_positions once all is read.
        self.is_behind = False
        self._buffer_tokens = buffer_tokens  # of all samples together
        self._chunks: deque[Chunk] = deque()
        self._num_buffered = 0
        self._ended_samples: set[int] = set()
        self._waiters: set[asyncio.Future[None]] = set()
        self._on_arrival: Callable[[], None] | None = None

    @property
    def has_ended(self) -> bool:
        return self.outcome is not None or self.error is not None

    @property
    def is_read(self) -> bool:
        """True if it has ended and its output was taken."""
        return self.has_ended and not self._chunks

    @property
    def next_positions(self) -> list[int]:
        """Next position of each sample; missing ones are 0."""
        num_samples = max(self._positions, default=-1) + 1
        return [self._positions.get(index, 0) for index in range(num_samples)]

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples that were received here or that the reader had before."""
        return sum(self._positions.values())

    def record_acceptance(self, accepted: Accepted) -> None:
        """Store the acceptance; later ones, from attaching again, are ignored."""
        if self.accepted is None:
            self.accepted = accepted
            self._wake()

    def push_chunk(self, chunk: Chunk) -> None:
        """Buffer a chunk, unless it is known already or the buffer is full.

        Raises QuireError if the positions are impossible, which is a fault of the server.
        """
        if self.is_behind or (self._ended_samples and chunk.index in self._ended_samples) or self.has_ended:
            return
        due = self._positions.get(chunk.index, 0)
        end = chunk.position + chunk.num_tokens
        if chunk.index >= MAX_SAMPLES or end > MAX_POSITION:
            raise QuireError(
                f"request {self.request_id}: the server sent position {end} of sample {chunk.index}, beyond any output"
            )
        if chunk.num_tokens and end <= due:
            return
        if chunk.token_ids and len(chunk.token_ids) != chunk.num_tokens:
            raise QuireError(
                f"request {self.request_id}: {len(chunk.token_ids)} token ids came as {chunk.num_tokens} tokens"
            )
        if chunk.text_ends and len(chunk.text_ends) != chunk.num_tokens:
            raise QuireError(
                f"request {self.request_id}: ends of {len(chunk.text_ends)} tokens came as {chunk.num_tokens} tokens"
            )
        if chunk.position != due:
            raise QuireError(
                f"request {self.request_id}: of sample {chunk.index} the server sent position {chunk.position} where "
                f"{due} was due"
            )
        if self._chunks and self._num_buffered >= self._buffer_tokens:
            self.is_behind = True
            return
        self._chunks.append(chunk)
        self._num_buffered += max(1, chunk.num_tokens)
        self._positions[chunk.index] = end
        if chunk.finish is not None:
            self._ended_samples.add(chunk.index)
        self._wake()

    def record_outcome(self, outcome: Outcome) -> None:
        """Store the terminal state, after all output."""
        self.outcome = outcome
        self._wake()

    def fail(self, error: QuireError) -> None:
        """End the request for its reader, whatever becomes of it on the server; what was dropped is not fetched."""
        if not self.has_ended:
            self.error, self.is_behind = error, False
            self._wake()

    def listen(self, on_arrival: Callable[[], None] | None) -> None:
        """Call back for each chunk that has arrived or arrives, and for the end, within the session's turn; None: stop.

        It may be called more often.
        """
        self._on_arrival = on_arrival
        for _ in range(len(self._chunks) + self.has_ended):
            self._tell()

    def take_chunk(self, on_drained: Callable[["OpenRequest"], None]) -> Chunk | None:
        """The next chunk that has arrived; None if none has. Raises the error of `fail`, after the output before it.

        Args:
            on_drained: called when the buffer is empty and output was dropped.
        """
        if not self._chunks:
            if self.error is not None:
                raise self.error
            return None
        chunk = self._chunks.popleft()
        self._num_buffered -= max(1, chunk.num_tokens)
        if self.is_behind and not self._chunks:
            self.is_behind = False
            on_drained(self)
        return chunk

    async def next_chunk(self, on_drained: Callable[["OpenRequest"], None]) -> Chunk | None:
        """The next chunk; None after the last. Otherwise as `take_chunk`."""
        while (chunk := self.take_chunk(on_drained)) is None and self.outcome is None:
            await self._wait()
        return chunk

    async def wait_accepted(self) -> Accepted:
        """The acceptance, once it has arrived. Raises the error of `fail`."""
        while self.accepted is None:
            if self.error is not None:
                raise self.error
            await self._wait()
        return self.accepted

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)  # its task may have been cancelled, and come back for as long as nothing does

    def _wake(self) -> None:
        self._tell()
        if self._waiters:
            for waiter in self._waiters:
                if not waiter.done():  # it is if its task was cancelled
                    waiter.set_result(None)
            self._waiters.clear()

    def _tell(self) -> None:
        if self._on_arrival is None:
            return
        try:
            self._on_arrival()
        except Exception as error:  # is not the session's, which carries other requests
            told = {"message": f"the listener of request {self.request_id} failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(told)
