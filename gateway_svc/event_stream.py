"""Server-sent events: an answer that is written event by event, and ends when its reader has gone.

Knows no API: an event is bytes, as `data_event` makes them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway_svc.body_writer import body_writer
from gateway_svc.departure import unless_departed
from gateway_svc.generation import Generation

SILENCE_S = 15.0  # after which proxies and clients are told that the answer goes on
_EVENT_END = b"\n\n"
_ID = b"id: "
# Readers that split at blank lines skip a comment, and with it the event that follows unless a blank line is between
# them. OpenAI's client takes a blank line for an event, but only once one had an id.
COMMENT = b": waiting\n\n"
COMMENT_AMONG_IDS = b": waiting\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # a proxy must not collect events

Wait = Callable[[], Awaitable[None]]
# Events to send; what to wait for before the next step, and whose failure is raised there; None: for output to arrive.
Step = bytes | Wait | None
Steps = Generator[Step, None, None]


async def _end() -> None:
    """Wait for nothing: there are no more steps."""


async def next_turn() -> None:
    """Wait for the next turn of the event loop: more is to be made than others should wait for."""
    await asyncio.sleep(0)


def data_event(data: bytes) -> bytes:
    """One event with JSON data, which has no line breaks."""
    return b"data: " + data + _EVENT_END


def named_event(name: str, data: bytes) -> bytes:
    """One event of a type."""
    return b"event: " + name.encode() + b"\n" + data_event(data)


def single_events(events: bytes) -> list[bytes]:
    """Events that were joined, one by one."""
    return [each + _EVENT_END for each in events.split(_EVENT_END)[:-1]]


def with_id(event_id: str, event: bytes) -> bytes:
    """The event with the id by which a client may resume behind it."""
    return _ID + event_id.encode() + b"\n" + event


class EventStream(Response):
    """Sends the events that are made of a generation, which is closed in the end, also when the client disconnects.

    An event is written in the turn of the loop in which its output arrives: no task wakes up for it. The task of the
    answer waits for whatever else there is: a client that reads slowly, tokens that have to be looked up, the end.
    While nothing comes, it sends a comment now and then: a proxy would take the connection for dead, and its end
    cancels a request that only waits for its turn.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        steps: Steps,
        headers: dict[str, str] | None = None,
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Send events.

        Args:
            generation: output of which the steps make events.
            steps: events in their order, and what to wait for between them.
            headers: of the answer.
            silence_s: without an event, after which a comment is sent.
        """
        super().__init__(headers={**_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._generation = generation
        self._steps = steps
        self._silence_s = silence_s
        self._num_sent = 0
        self._last = b""  # event that was sent
        self._failure: Exception | None = None  # of what was waited for, which the steps are told
        self._is_idle = False  # while the task waits for output
        self._met: asyncio.Future[Wait]  # what else is to be waited for then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_departed(receive, self._send_events(scope, send))

    async def _send_events(self, scope: Scope, send: Send) -> None:
        self._body = body_writer(scope)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._body.begin()
            self._generation.listen(self._write_arrived)
            await self._write_all()
        finally:
            self._is_idle = False
            self._body.flush()
            self._steps.close()
            await self._generation.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_all(self) -> None:
        wait = self._write()
        while wait is not _end:
            if wait is None:
                wait = await self._wait_for_output()
            else:
                try:
                    await wait()
                except Exception as error:
                    self._failure = error
                wait = self._write()

    async def _wait_for_output(self) -> Wait:
        """Wait while what arrives is written in its turn. Returns what to wait for then."""
        self._is_idle, self._met = True, asyncio.get_running_loop().create_future()
        while True:
            num_sent = self._num_sent
            done, _ = await asyncio.wait({self._met}, timeout=self._silence_s)
            if done:
                return self._met.result()
            if num_sent == self._num_sent:
                self._body.write(COMMENT_AMONG_IDS if self._last.startswith(_ID) else COMMENT)

    def _write_arrived(self) -> None:
        """Write what has arrived, unless the task waits for something else, and will."""
        if not self._is_idle:
            return
        try:
            wait = self._write()
            if wait is not None:
                self._is_idle = False
                self._met.set_result(wait)
        except Exception as error:  # is raised where it is waited for
            self._is_idle = False
            self._met.set_exception(error)

    def _write(self) -> Wait | None:
        """Write events as long as there are any. Returns what to wait for; None: for output to arrive."""
        while not self._body.is_paused:
            step = next(self._steps, _end) if self._failure is None else self._told_failure(self._failure)
            if not isinstance(step, bytes):
                return step
            self._num_sent += 1
            self._last = step or self._last
            self._body.write(step)
        return self._body.drained

    def _told_failure(self, failure: Exception) -> Step:
        """The step that follows a failure: most often an event that tells it. Raises a failure that no step tells."""
        self._failure = None
        try:
            return self._steps.throw(failure)
        except StopIteration:
            return _end
