"""One client process's session: many requests over one stream.

The reader starts what the client asks for; the writer takes, when the last message is gone, what every request has
gained since. Nothing is buffered here: a subscription is a position.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from common.errors import FieldViolation, InvalidRequestError, QuireError, to_status
from protos import inference_pb2 as pb
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.output_stream import Subscription

Start = Callable[[int, pb.SessionRequest], Awaitable[None]]


class Session:
    """Requests by handle. Closing it detaches from all."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._subscriptions: dict[int, Subscription] = {}
        self._handle_of: dict[Subscription, int] = {}
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._events: list[pb.SessionEvent] = []  # accepted and error, in order
        self._with_news: dict[Subscription, None] = {}  # ordered
        self._news = asyncio.Event()
        self._ended = False

    async def read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Takes the client's messages until it closes its side; then what is open still runs to its end."""
        try:
            async for request in requests:
                self._take(request)
        finally:
            self._ended = True
            self._news.set()

    async def next_response(self) -> pb.SessionResponse | None:
        """Waits for news and returns all of it. None: the client is done and so are its requests."""
        while not (self._events or self._with_news):
            if self._ended and not self._subscriptions and not self._starting:
                return None
            await self._news.wait()
            self._news.clear()
        events, self._events = self._events, []
        fresh, self._with_news = self._with_news, {}
        for subscription in fresh:
            handle = self._handle_of.get(subscription)
            if handle is None:
                continue
            chunk, finished = subscription.take()
            if chunk is not None:
                events.append(pb.SessionEvent(handle=handle, chunk=chunk))
            if finished is not None:
                events.append(pb.SessionEvent(handle=handle, finished=finished))
                self._drop(handle)
        return pb.SessionResponse(events=events)

    def close(self) -> None:
        """Detaches from every request."""
        for task in self._starting.values():
            task.cancel()
        for handle in list(self._subscriptions):
            self._drop(handle)

    def _take(self, request: pb.SessionRequest) -> None:
        handle, action = request.handle, request.WhichOneof("action")
        if action in ("submit", "attach"):
            if handle in self._subscriptions or handle in self._starting:
                self._refuse(handle, _violation("handle", f"{handle} is in use in this session"))
                return
            start = self._submit if action == "submit" else self._attach
            task = asyncio.create_task(self._guard(handle, start, request))
            self._starting[handle] = task
        elif action == "cancel":
            asyncio.create_task(self._cancel(handle)).add_done_callback(_retrieve)
        elif action == "detach":
            if handle in self._starting:
                self._starting[handle].cancel()
            elif handle in self._subscriptions:
                self._drop(handle)
        else:
            self._refuse(handle, _violation("action", "give `submit`, `attach`, `cancel` or `detach`"))

    async def _guard(self, handle: int, start: Start, request: pb.SessionRequest) -> None:
        try:
            await start(handle, request)
        except QuireError as error:
            self._refuse(handle, error)
        finally:
            del self._starting[handle]
            self._news.set()

    async def _submit(self, handle: int, request: pb.SessionRequest) -> None:
        stream, accepted = await self._admission.submit(request.submit, None)
        self._open(handle, self._admission.readers.subscribe(stream, 0, self._on_news), accepted)

    async def _attach(self, handle: int, request: pb.SessionRequest) -> None:
        stream = await self._admission.find(request.attach.request_id)
        positions = request.attach.from_positions
        accepted = pb.Accepted()
        accepted.CopyFrom(stream.accepted)
        accepted.attached = True
        subscription = self._admission.readers.subscribe(stream, positions[0] if positions else 0, self._on_news)
        self._open(handle, subscription, accepted)

    async def _cancel(self, handle: int) -> None:
        task = self._starting.get(handle)
        if task is not None:
            await asyncio.wait([task])
        subscription = self._subscriptions.get(handle)
        if subscription is not None:
            await self._admission.cancel(subscription.stream.accepted.request_id)

    def _open(self, handle: int, subscription: Subscription, accepted: pb.Accepted) -> None:
        self._subscriptions[handle] = subscription
        self._handle_of[subscription] = handle
        self._events.append(pb.SessionEvent(handle=handle, accepted=accepted))
        self._on_news(subscription)

    def _drop(self, handle: int) -> None:
        subscription = self._subscriptions.pop(handle)
        del self._handle_of[subscription]
        self._with_news.pop(subscription, None)
        subscription.close()

    def _on_news(self, subscription: Subscription) -> None:
        self._with_news[subscription] = None
        self._news.set()

    def _refuse(self, handle: int, error: QuireError) -> None:
        status = to_status(error)
        self._events.append(
            pb.SessionEvent(
                handle=handle,
                error=pb.Error(code=status.code, message=status.message, status=status.SerializeToString()),
            )
        )
        self._news.set()


def _violation(field: str, description: str) -> InvalidRequestError:
    return InvalidRequestError.of([FieldViolation(field, description)])


def _retrieve(task: "asyncio.Task[None]") -> None:
    if not task.cancelled():
        task.exception()  # a request that has vanished meanwhile needs no cancelling
