"""The `Session` stream that carries all requests of a client: submits, dispatches, and resumes after a break.

One task reads the stream and hands each event to its request; nothing here waits for a reader. When the stream
breaks, it is opened again with backoff, and every open request is attached from its position. A request gets a
fresh handle each time, so that late events of an old handle are dropped.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import grpc

from quire.client_home import CLOSED
from quire.errors import (
    DataLossError,
    InvalidRequestError,
    NotFoundError,
    NotLeaderError,
    QuireError,
    RequestCancelledError,
    RequestExpiredError,
    RetryableError,
    ShardsChangedError,
    UnavailableError,
)
from quire.keywords import in_keywords
from quire.leader_search import LeaderSearch
from quire.open_request import OpenRequest
from quire.params import ClientOptions
from quire.reconnect_backoff import SETTLED_S, ReconnectBackoff
from quire.rpc import error_of, is_cancelled, server_error_of
from quire.server_errors import lost_request_error, no_leader_error, said_error, unreachable_error
from quire.servers import Servers
from quire.session_entry import Entry
from quire.session_wire import ResponseReader, open_session
from quire.silence import ASK_AFTER_S
from quire.v1 import inference_pb2 as pb
from quire.wire_results import accepted_from_pb, chunk_from_pb, error_from_pb, outcome_from_pb

log = logging.getLogger(__name__)

DEADLINE_SLACK_S = 1.0  # the server reports a passed deadline itself; this long after it the client does
BLOCKED_S = 0.25  # a timer this late tells of a blocked event loop: what the server has said meanwhile lies unread
CLOSE_S = 0.5

MAX_UNREADABLE = 8  # unreadable messages in a row, after which the connection is not to blame
LISTEN_S = 0.5  # between two checks for silent requests
MAX_FATAL = 3  # streams in a row that end with one of these; one alone may be due to a flipped bit
# Statuses that refuse this client, and are not signs of a broken connection.
FATAL_CODES = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)


class Placed(Protocol):
    """A request where it is handled now."""

    def cancel(self, request: OpenRequest) -> None:
        """Cancels it; see `Session.cancel`."""

    def detach(self, request: OpenRequest) -> None:
        """Stops reading it; see `Session.detach`."""

    def catch_up(self, request: OpenRequest) -> None:
        """Attaches again from the reader's position; see `Session.catch_up`."""


class Session:
    """The one stream of a client to one shard. Belongs to the event loop it was made in."""

    def __init__(
        self,
        servers: Servers,
        address: str,
        options: ClientOptions,
        move: Callable[[Entry, ShardsChangedError], Placed],
        on_later_leader: Callable[[], None] | None = None,
    ) -> None:
        """Take addresses, and what to do with what happens at them.

        Args:
            servers: of the client.
            address: that it was given.
            options: of the client.
            move: takes over a request that the shard does not take, since the number of shards has changed.
            on_later_leader: called once another server is found to lead, which is the current one by then.
        """
        self._move = move
        self._on_later_leader = on_later_leader
        self._moved: WeakKeyDictionary[OpenRequest, Placed] = WeakKeyDictionary()
        self._servers = servers
        self._address = address
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._entries: dict[OpenRequest, Entry] = {}
        self._by_handle: dict[int, Entry] = {}
        self._handles = itertools.count(1)
        self._outgoing: asyncio.Queue[pb.SessionRequest | None] | None = None  # None: no stream
        self._task: asyncio.Task[None] | None = None
        self._was_reached = False
        self._was_answered = False  # on the stream that is open, or was last
        self._backoff = ReconnectBackoff(self._loop.time())
        self._is_closing = False
        self._num_unreadable = 0  # unreadable messages in a row
        self._num_fatal = 0  # streams in a row that ended with a fatal status
        self._silence_timer: asyncio.TimerHandle | None = None  # the next check for silent requests
        self._has_waited = False  # with the last one, since the event loop had been blocked
        self._output_s = self._loop.time()  # when any request had output last
        self._limit: asyncio.Timeout | None = None  # of the stream that is open
        self._search = LeaderSearch(servers, self._go_to_later_leader)

    def open(self, entry: Entry) -> None:
        """Submits a request, or attaches to it."""
        if self._is_closing:
            raise RuntimeError(CLOSED)
        self._moved.pop(entry.request, None)  # it has come back
        self._entries[entry.request] = entry
        if entry.deadline_s is not None:
            self._set_expiry(entry, entry.deadline_s + DEADLINE_SLACK_S)
        if self._outgoing is not None:
            self._submit_or_attach(entry)
        elif self._task is None or self._task.done():
            self._task = self._loop.create_task(self._run(), name="quire-session")

    def look_for_later_leader(self) -> None:
        """Look whether another server leads by now, since the current one gets nothing done."""
        self._search.begin()

    def expect_leader(self) -> None:
        """Wait for the leader as long as after a broken stream: the deployment has answered, so one will come."""
        self._was_reached = True

    def cancel(self, request: OpenRequest) -> None:
        """Cancels a request whose output nobody reads any more."""
        entry = self._entries.get(request)
        if entry is None:
            if (moved := self._moved.get(request)) is not None:
                moved.cancel(request)
            return
        entry.is_cancelled = True
        request.fail(RequestCancelledError(f"request {request.request_id} was cancelled by its reader"))
        if not entry.was_sent or (entry.retries_later and request.accepted is None):
            self._forget(entry)  # the server does not have it
        elif entry.retries_later:
            pass  # the cancellation goes with the attachment that comes next
        elif entry.handle is not None:
            self._send(pb.SessionRequest(handle=entry.handle, cancel=pb.Cancellation()))
        elif self._outgoing is not None:
            self._submit_or_attach(entry)

    def detach(self, request: OpenRequest) -> None:
        """Stops reading a request; its on_disconnect decides whether it goes on."""
        entry = self._entries.get(request)
        if entry is None:
            if (moved := self._moved.get(request)) is not None:
                moved.detach(request)
            return
        request.fail(RequestCancelledError(f"the reader of request {request.request_id} was closed"))
        if entry.handle is not None:
            self._send(pb.SessionRequest(handle=entry.handle, detach=pb.Detachment()))
        self._forget(entry)

    def catch_up(self, request: OpenRequest) -> None:
        """Attaches again from the reader's position, after output was dropped because the buffer was full."""
        entry = self._entries.get(request)
        if entry is None and (moved := self._moved.get(request)) is not None:
            moved.catch_up(request)
        if entry is None or self._outgoing is None or entry.retries_later:
            return  # it is attached to later
        late = entry.handle
        if entry.deadline_s is not None and (at_s := self._loop.time() + DEADLINE_SLACK_S) > entry.expires_s:
            self._set_expiry(entry, at_s)
        self._submit_or_attach(entry)  # first, so that the request always has a reader
        if late is not None:
            self._by_handle.pop(late, None)
            self._send(pb.SessionRequest(handle=late, detach=pb.Detachment()))

    async def close(self) -> None:
        """Detaches every request and ends the stream."""
        self._is_closing = True
        for entry in list(self._entries.values()):
            if not entry.is_cancelled:
                self.detach(entry.request)
        if self._outgoing is not None:
            self._outgoing.put_nowait(None)
        await self._search.close()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_S if self._outgoing is not None else 0)
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            await self._keep_open()
        except DataLossError as error:  # again and again: the server's doing, and each request's answer
            for entry in list(self._entries.values()):  # each gets one of its own: it is raised, with its traceback
                self._give_up(entry, DataLossError(error.message))
        except Exception as error:
            for entry in list(self._entries.values()):
                self._give_up(entry, QuireError(f"the session failed: {error!r}"))
            raise

    async def _keep_open(self) -> None:
        """Keeps a stream open while there are requests, or until it breaks without any."""
        while self._entries and not self._is_closing:
            started_s = self._loop.time()
            error = await self._run_stream()
            if self._is_closing:
                return
            is_fatal = error is not None and error.code() in FATAL_CODES
            self._num_fatal = self._num_fatal + 1 if is_fatal else 0
            now_s = self._loop.time()
            lived_s = now_s - started_s if self._was_answered else 0.0  # something else may have taken the call
            if error is not None and self._num_fatal >= MAX_FATAL:
                for entry in self._refused_by(error.code()):
                    self._give_up(entry, said_error(self._address, error))
                self._num_fatal = 0 if self._entries else self._num_fatal
            for entry in list(self._entries.values()):
                self._handle_broken_stream(entry, error, lived_s)
            leader_is_known = error is not None and self._servers.record_failure(
                error_of(error), was_reached=bool(error.trailing_metadata())
            )
            await asyncio.sleep(self._backoff.pause_s(now_s, lived_s=lived_s, leader_is_known=leader_is_known))

    async def _run_stream(self) -> grpc.aio.AioRpcError | None:
        """Carries all requests over one stream until it ends. Returns the cause; None: the server closed it."""
        await self._servers.find_reachable()
        channel = self._servers.current_channel
        self._was_answered = False
        outgoing: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._outgoing = outgoing
        self._submit_or_attach_all()
        call = open_session(channel, _until_none(outgoing), self._servers.metadata)
        reader = ResponseReader()
        error: grpc.aio.AioRpcError | None = None
        data: Any
        try:
            async with asyncio.timeout(None) as self._limit:
                self._listen()
                while (data := await call.read()) is not grpc.aio.EOF:
                    self._take_response(reader.read(data))
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            log.debug("a connection that was given up has ended; attaching again over the new one")
        except TimeoutError:
            log.debug("a request was not answered; attaching again from its position over a new connection")
        except grpc.aio.AioRpcError as rpc_error:
            error = rpc_error
        except (DataLossError, LookupError, ValueError) as unreadable:  # damaged, or in words that we do not know
            self._num_unreadable += 1
            if self._num_unreadable > MAX_UNREADABLE:
                raise
            log.warning("an unreadable server message (%s); attaching again from the last position", unreadable)
        finally:
            if self._silence_timer is not None:
                self._silence_timer.cancel()
            self._outgoing = self._limit = self._silence_timer = None
            self._by_handle.clear()
            call.cancel()
            outgoing.put_nowait(None)  # a call that ended by itself leaves its task waiting for our next message
        if error is None or not isinstance(server_error_of(error), NotLeaderError | RetryableError):
            self._servers.renew_connection(channel)
        return error

    def _end_stream(self) -> None:
        """End the stream, and go on with another one, unless it is ending."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(self._loop.time())

    def _listen(self) -> None:
        """Look for silent requests now and then; once not, where the event loop was blocked meanwhile."""
        was_blocked = self._silence_timer is not None and self._loop.time() - self._silence_timer.when() > BLOCKED_S
        if not was_blocked or self._has_waited:
            self._reattach_silent_requests()
        self._has_waited = was_blocked
        self._silence_timer = self._loop.call_later(LISTEN_S, self._listen)

    def _reattach_silent_requests(self) -> None:
        """Attaches again to silent requests; ends the stream if that is not answered either.

        All of them have their patience doubled by one new connection: a server with more requests to answer than it
        can in that time would be left again and again, and would not know that its requests still have a reader.
        """
        now_s = self._loop.time()
        # The reader of a request that is behind decides when to continue.
        entries = [entry for entry in self._by_handle.values() if not entry.request.is_behind]
        actions = [entry.silence.next_action(now_s) for entry in entries]
        if "renew" in actions:
            self._end_stream()
            return
        if "ask" in actions and now_s - self._output_s >= ASK_AFTER_S:
            self._search.begin()
        for entry, action in zip(entries, actions, strict=True):
            if action == "ask":
                self.catch_up(entry.request)

    def _go_to_later_leader(self) -> None:
        """End the stream; the next one goes to the server that is current by now."""
        self._end_stream()
        if self._on_later_leader is not None:
            self._on_later_leader()

    def _take_response(self, response: pb.SessionResponse) -> None:
        self._was_reached = self._was_answered = True
        now_s = self._loop.time()
        self._backoff.record_server_reached(now_s)
        for event in response.events:
            self._dispatch(event, now_s)

    def _submit_or_attach_all(self) -> None:
        """Begin with each request on a new stream, whose task keeps none of them."""
        for entry in list(self._entries.values()):
            if not entry.retries_later:
                self._submit_or_attach(entry)

    def _submit_or_attach(self, entry: Entry) -> None:
        """Submits a request, or attaches to it, on the current stream under a fresh handle."""
        entry.handle = handle = next(self._handles)
        self._by_handle[handle] = entry
        entry.was_sent = True
        entry.silence.record_request(self._loop.time())
        request = entry.request
        if entry.submission is not None and not entry.is_cancelled:
            submit = pb.SessionRequest(handle=handle, submit=entry.submission, shards_version=entry.shards_version)
            self._send(submit)
        else:
            attach = pb.Attach(request_id=request.request_id, from_positions=request.next_positions)
            self._send(pb.SessionRequest(handle=handle, attach=attach))
        if entry.is_cancelled:
            self._send(pb.SessionRequest(handle=handle, cancel=pb.Cancellation()))

    def _send(self, request: pb.SessionRequest) -> None:
        if self._outgoing is not None:
            self._outgoing.put_nowait(request)

    def _dispatch(self, event: pb.SessionEvent, now_s: float) -> None:
        entry = self._by_handle.get(event.handle)
        if entry is None:
            return
        request = entry.request
        kind = event.WhichOneof("event")
        if kind != "error":
            entry.unreachable_since_s = None
        if kind == "chunk":
            self._output_s = now_s
            entry.silence.record_output(now_s)
        else:
            entry.silence.record_answer(now_s)
        match kind:
            case "chunk":
                self._take(entry, event.chunk)
            case "accepted":
                entry.moved_since_s = entry.submission = None
                request.record_acceptance(accepted_from_pb(event.accepted))
            case "finished" if request.is_behind and not request.has_ended:
                self._drop_handle(entry)  # its end comes again when the rest is fetched
            case "finished":
                self._end(entry, event.finished)
            case "error":
                self._refused(entry, _in_keywords(error_from_pb(event.error)))

    def _end(self, entry: Entry, finished: pb.Finished) -> None:
        try:
            entry.request.record_outcome(outcome_from_pb(finished))
        except QuireError as error:  # in words of a later version: the message was whole, and would come again
            entry.request.fail(error)
        self._forget(entry)

    def _take(self, entry: Entry, chunk: pb.Chunk) -> None:
        try:
            entry.request.push_chunk(chunk_from_pb(chunk))
        except QuireError as error:
            entry.num_misfits += 1
            if entry.num_misfits > MAX_UNREADABLE:
                entry.request.fail(error)
                self.detach(entry.request)
            else:
                log.warning("%s; attaching again from the last position", error)
                self.catch_up(entry.request)
            return
        entry.num_misfits = self._num_unreadable = 0
        if entry.request.is_behind and not entry.holds_when_behind and entry.handle is not None:
            self._send(pb.SessionRequest(handle=entry.handle, detach=pb.Detachment()))
            self._drop_handle(entry)

    def _refused(self, entry: Entry, error: QuireError) -> None:
        self._drop_handle(entry)
        request = entry.request
        if isinstance(error, NotFoundError) and entry.is_own and request.accepted is not None:
            error = lost_request_error(request.request_id, request.num_tokens)
        if isinstance(error, ShardsChangedError) and request.accepted is None and not entry.is_cancelled:
            self._forget(entry)
            self._moved[request] = self._move(entry, error)
            return
        if isinstance(error, UnavailableError):
            self._search.begin()
        delay_s = self._retry_delay_s(entry, error)
        if delay_s is None:
            self._give_up(entry, error)
            return
        entry.retries_later = True
        entry.timers.append(self._loop.call_later(delay_s, self._retry, entry))

    def _retry_delay_s(self, entry: Entry, error: QuireError) -> float | None:
        """Delay until a refused request is tried again; None: never."""
        is_gone = entry.is_cancelled and entry.request.accepted is None
        if is_gone or not isinstance(error, RetryableError):
            return None
        now_s = self._loop.time()
        delay_s = error.retry_after_s * random.uniform(1.0, 1.2)
        if entry.request.accepted is not None:  # it is safe on the server; only the way to it is shut
            entry.unreachable_since_s = entry.unreachable_since_s or now_s
            give_up_s = entry.unreachable_since_s + self._options.reconnect_timeout_s
            return delay_s if now_s + delay_s < give_up_s else None
        entry.num_refusals += 1
        if entry.num_refusals > self._options.retries:
            return None
        in_time = entry.deadline_s is None or now_s + delay_s < entry.deadline_s
        return delay_s if in_time else None

    def _retry(self, entry: Entry) -> None:
        entry.retries_later = False
        if self._outgoing is not None and entry.request in self._entries:
            self._submit_or_attach(entry)

    def _refused_by(self, code: grpc.StatusCode) -> list[Entry]:
        """Requests to give up after streams that ended with such a status.

        Those that the server has taken are not what it cannot read, as long as there are others.
        """
        entries = list(self._entries.values())
        untaken = [entry for entry in entries if entry.request.accepted is None]
        return untaken if untaken and code is grpc.StatusCode.INVALID_ARGUMENT else entries

    def _handle_broken_stream(self, entry: Entry, error: grpc.aio.AioRpcError | None, lived_s: float) -> None:
        """Resume one request after a broken stream, or fail it."""
        entry.handle = None
        now_s = self._loop.time()
        if entry.unreachable_since_s is None or lived_s > SETTLED_S:
            entry.unreachable_since_s = now_s
        options = self._options
        is_silent = error is None and not self._was_answered  # a proxy, or a server that is very busy
        is_there = self._was_reached or is_silent
        limit_s = options.reconnect_timeout_s if is_there else options.connect_timeout_s
        reason = error_of(error) if error is not None else None
        entry.unreachable = (
            no_leader_error(self._address, reason)
            if isinstance(reason, NotLeaderError)
            else unreachable_error(self._address, error, is_silent=is_silent)
        )
        if now_s - entry.unreachable_since_s >= limit_s:
            self._give_up(entry, entry.unreachable)

    def _set_expiry(self, entry: Entry, at_s: float) -> None:
        entry.expires_s = at_s
        entry.timers.append(self._loop.call_at(at_s, self._expire_request, entry, at_s))

    def _expire_request(self, entry: Entry, at_s: float) -> None:
        """Fail a request whose deadline passed without word from the server, unless it expires later than this."""
        if entry.request.is_behind or at_s < entry.expires_s:
            return  # the rest, and with it the end, is still to be fetched
        if (now_s := self._loop.time()) - at_s > BLOCKED_S:
            self._set_expiry(entry, now_s + DEADLINE_SLACK_S)
            return
        request = entry.request
        if entry.handle is not None:
            self._send(pb.SessionRequest(handle=entry.handle, cancel=pb.Cancellation()))
        passed = f"request {request.request_id}: the deadline passed"
        if entry.unreachable is not None and entry.unreachable_since_s is not None:
            passed = f"{passed}; {entry.unreachable.message}"
        elif request.accepted is None and not entry.num_refusals:
            passed = f"{passed} before the server at {self._address} answered"
        self._give_up(entry, RequestExpiredError(passed))

    def _give_up(self, entry: Entry, error: QuireError) -> None:
        entry.request.fail(error)
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        self._drop_handle(entry)
        for timer in entry.timers:
            timer.cancel()
        self._entries.pop(entry.request, None)

    def _drop_handle(self, entry: Entry) -> None:
        if entry.handle is not None:
            self._by_handle.pop(entry.handle, None)
            entry.handle = None


async def _until_none(outgoing: "asyncio.Queue[pb.SessionRequest | None]") -> AsyncIterator[pb.SessionRequest]:
    while (message := await outgoing.get()) is not None:
        yield message


def _in_keywords(error: QuireError) -> QuireError:
    return in_keywords(error, "prompt") if isinstance(error, InvalidRequestError) else error
