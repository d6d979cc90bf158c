"""Session of one client process: many requests over one stream.

The reader starts the requests that the client sends; the writer takes, when the last message has left, the new output
of each request. Output is not buffered here: a subscription is a position. If the client does not read, its messages
are not read either.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import structlog

from common.bounds_check import OutOfBoundsError
from common.native_faults import CONTROL_FLOW
from common.violations import refusal_of
from quire.errors import DataLossError, InvalidRequestError, OverloadedError, QuireError, to_status
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.live.output_stream import Subscription
from scheduler_svc.requests.request_control import RequestControl

log = structlog.get_logger()

MAX_OPEN_STARTS = 1024  # submissions and attachments being made, and answers to such not yet taken by the client
MAX_RESPONSE_TOKENS = 8192  # with every logprob that can be asked for, about 2 MB


@dataclass(slots=True, eq=False)
class _Start:
    """Submission or attachment being made. Nobody is told what becomes of a detached one."""

    handle: int
    attaches_to: str = ""  # request_id; empty: it is a submission
    is_cancelled: bool = False  # as soon as it has started
    is_detached: bool = False
    task: "asyncio.Task[None] | None" = None


Begin = Callable[[_Start, pb.SessionRequest], Awaitable[None]]


class ServerSession:
    """Requests of a client by handle. `close` detaches from each."""

    def __init__(self, admission: Admission, control: RequestControl) -> None:
        self._admission = admission
        self._control = control
        self._subscriptions: dict[int, Subscription] = {}
        self._handle_of: dict[Subscription, int] = {}
        self._starting: dict[int, _Start] = {}  # by handle, without the detached ones
        self._starts: set[_Start] = set()  # all
        self._events: list[pb.SessionEvent] = []  # accepted and error, in order
        self._with_news: OrderedDict[Subscription, None] = OrderedDict()  # or perhaps none; the next in turn first
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = False  # the client has closed its side
        self._broken = False  # `read` has failed
        self._num_taken = 0  # messages of the client
        self._num_sent = 0

    async def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Read the client's messages until it closes its side; open requests still run to their end."""
        try:
            while await self._take_next(requests):
                while len(self._starts) + len(self._events) >= MAX_OPEN_STARTS:
                    self._room.clear()
                    await self._room.wait()
        except BaseException:
            self._broken = True
            raise
        finally:
            self._ended = True
            self._news.set()

    async def _take_next(self, requests: AsyncIterator[pb.SessionRequest]) -> bool:
        """Read one message. False: there are no more. A message above the bounds refuses its handle alone.

        Raises DataLossError if a message before it was lost.
        """
        self._num_taken += 1
        try:
            request = await anext(requests)
        except StopAsyncIteration:
            return False
        except OutOfBoundsError as error:
            self._refuse_message(error.numbers["handle"], error)
            return True
        if request.number and request.number != self._num_taken:
            raise DataLossError(f"message {self._num_taken} was due and {request.number} came; open the session again")
        try:
            self._handle_message(request)
        except CONTROL_FLOW:
            raise
        except BaseException:
            log.exception("message of a session not taken", handle=request.handle)
            self._detach(request.handle)  # which may be in use, and is free after this error
            self._refuse(request.handle, QuireError("the server failed to take the message; its log says why"))
        return True

    async def next_response(self) -> pb.SessionResponse | None:
        """Wait for news and return it. None: the client and its requests are done, or `read` has failed."""
        while not self._broken:
            response = self._take_news()
            if response.events:
                self._num_sent += 1
                response.number = self._num_sent
                return response
            if self._ended and not self._subscriptions and not self._starts:
                return None
            await self._news.wait()
            self._news.clear()
        return None

    def close(self) -> None:
        """Detach from every request."""
        for start in self._starts:
            self._detach_start(start)
        for handle in list(self._subscriptions):
            self._drop(handle)

    def _take_news(self) -> pb.SessionResponse:
        """News of the requests, as much as one message holds; a request with more waits behind the others."""
        response = pb.SessionResponse(events=self._events)
        self._events = []
        self._room.set()
        num_left = MAX_RESPONSE_TOKENS
        while self._with_news and num_left > 0:
            subscription, _ = self._with_news.popitem(last=False)
            handle = self._handle_of[subscription]
            num_taken = subscription.take_chunks(partial(add_chunk, response, handle), num_left)
            if subscription.done:
                response.events.add(handle=handle, finished=subscription.stream.finished)
                self._drop(handle)
            elif num_taken >= num_left:
                self._with_news[subscription] = None
            num_left -= num_taken
        return response

    def _handle_message(self, request: pb.SessionRequest) -> None:
        handle, action = request.handle, request.WhichOneof("action")
        if action in ("submit", "attach"):
            if self._is_in_use(handle):
                self._refuse(handle, _in_use(handle))
                return
            num_open = len(self._subscriptions) + len(self._starts)
            if num_open >= self._admission.limits.max_requests_per_session:
                what = f"the session has {num_open} requests open, which is the limit; end some, or come back later"
                self._refuse(handle, OverloadedError(what, 1.0))
                return
            start = self._starting[handle] = _Start(handle, request.attach.request_id)
            self._starts.add(start)
            begin = self._submit if action == "submit" else self._attach
            start.task = asyncio.create_task(self._guard(start, begin, request))
            start.task.add_done_callback(lambda _: self._started(start))
        elif action == "cancel":
            self._cancel(handle)
        elif action == "detach":
            self._detach(handle)
        else:
            self._refuse_message(handle, refusal_of("action", "give `submit`, `attach`, `cancel` or `detach`"))

    async def _guard(self, start: _Start, begin: Begin, request: pb.SessionRequest) -> None:
        try:
            await begin(start, request)
        except CONTROL_FLOW:
            raise
        except QuireError as error:
            self._refuse_start(start, error)
        except BaseException:  # of a native library, too
            log.exception("request not started", handle=start.handle)
            self._refuse_start(start, QuireError("the server failed to start the request; its log says why"))

    def _started(self, start: _Start) -> None:
        self._starts.discard(start)
        if self._starting.get(start.handle) is start:
            del self._starting[start.handle]
        self._room.set()
        self._news.set()

    async def _submit(self, start: _Start, request: pb.SessionRequest) -> None:
        stream, accepted = await self._admission.submit(request.submit, None, request.shards_version)
        self._open(start, self._admission.readers.subscribe(stream, (), self._on_news), accepted)

    async def _attach(self, start: _Start, request: pb.SessionRequest) -> None:
        positions = request.attach.from_positions
        stream, accepted = await self._control.attach(request.attach.request_id, positions)
        subscription = self._admission.readers.subscribe(stream, positions, self._on_news)
        self._open(start, subscription, accepted)

    def _cancel(self, handle: int) -> None:
        subscription = self._subscriptions.get(handle)
        if subscription is not None:
            self._cancel_request(subscription)
        elif (start := self._starting.get(handle)) is not None:
            # A request that waits for its model ends now; the attachment to it tells of that.
            start.is_cancelled = not self._control.cancel_waiting(start.attaches_to)

    def _cancel_request(self, subscription: Subscription) -> None:
        """Cancel a request, unless it has ended: once its record has expired, its id may be another one's."""
        if subscription.stream.finished is None:
            self._control.cancel_live(subscription.stream.accepted.request_id)

    def _detach(self, handle: int) -> None:
        """Free a handle, under which nothing more comes of what used it."""
        self._events = [event for event in self._events if event.handle != handle]
        if handle in self._subscriptions:
            self._drop(handle)
        elif (start := self._starting.pop(handle, None)) is not None:
            self._detach_start(start)

    def _detach_start(self, start: _Start) -> None:
        """Tell nobody what becomes of a start. One that was cancelled goes on, for its request to be cancelled."""
        start.is_detached = True
        if not start.is_cancelled and start.task is not None:
            start.task.cancel()

    def _open(self, start: _Start, subscription: Subscription, accepted: pb.Accepted) -> None:
        self._started(start)  # now: from here on the request counts as a subscription
        if start.is_detached:  # and cancelled, else it would not have gone on
            self._cancel_request(subscription)
            self._with_news.pop(subscription, None)
            subscription.close()
            return
        self._subscriptions[start.handle] = subscription
        self._handle_of[subscription] = start.handle
        self._events.append(pb.SessionEvent(handle=start.handle, accepted=accepted))
        self._on_news(subscription)
        if start.is_cancelled:
            self._cancel(start.handle)

    def _drop(self, handle: int) -> None:
        subscription = self._subscriptions.pop(handle)
        del self._handle_of[subscription]
        self._with_news.pop(subscription, None)
        subscription.close()

    def _on_news(self, subscription: Subscription) -> None:
        self._with_news[subscription] = None
        self._news.set()

    def _refuse_start(self, start: _Start, error: QuireError) -> None:
        self._started(start)
        if not start.is_detached:
            self._refuse(start.handle, error)

    def _refuse_message(self, handle: int, error: InvalidRequestError) -> None:
        """Refuse a message alone: if its handle is in use, the request that has it goes on."""
        if self._is_in_use(handle):
            also = _in_use(handle)
            error = InvalidRequestError(f"{error.message}; {also.message}", [*error.violations, *also.violations])
        self._refuse(handle, error)

    def _is_in_use(self, handle: int) -> bool:
        return handle in self._subscriptions or handle in self._starting

    def _refuse(self, handle: int, error: QuireError) -> None:
        status = to_status(error)
        refused = pb.Error(code=status.code, message=status.message, status=status.SerializeToString())
        self._events.append(pb.SessionEvent(handle=handle, error=refused))
        self._news.set()


def _in_use(handle: int) -> InvalidRequestError:
    return refusal_of("handle", f"{handle} is in use in this session")


def add_chunk(response: pb.SessionResponse, handle: int) -> pb.Chunk:
    """Add an empty chunk for this handle to the response."""
    event = response.events.add()
    event.handle = handle  # given to `add` by name it would cost twice as much
    return event.chunk
