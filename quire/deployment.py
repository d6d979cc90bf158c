"""A client's view of a deployment: its shards, and the connection to each of them.

Most deployments have one shard; then all calls go over its connection. Of several, each is led by a scheduler of its
own, and its connection finds that one, and the next one that leads it, among the same addresses.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import grpc

from quire.client_home import CLOSED
from quire.connection import Connection
from quire.credentials import Credentials
from quire.deferred_session import DeferredSession
from quire.errors import NotFoundError, RequestExpiredError, RetryableError, ShardsChangedError, UnavailableError
from quire.params import ClientOptions
from quire.prompt_beginnings import Prompt, unpack_hashes
from quire.rpc import is_cancelled
from quire.session import Session
from quire.session_entry import Entry
from quire.shard_router import ShardRouter
from quire.shards import (
    MOST_SHARDS,
    Shard,
    ShardNumbers,
    led_shards,
    names_its_shard,
    new_request_id,
    places_of_id,
    session_number,
    shard_of_id,
)
from quire.v1 import cluster_pb2
from quire.v1 import inference_pb2 as pb

_ASK_S = 2.0  # for the shards, before a client goes on as if there were one, where it can
_TELL_NONE = (  # statuses of an older server, or of a proxy on the way, which will not say
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
)
_ANEW_S = 0.05  # before they are asked for anew behind a damaged message
_AGAIN_S = 0.5  # before the shards are asked for again
_ASSUMED_AGAIN_S = 5.0  # likewise, where there seems to be one shard, since what answered knows no shards
_FIRST_MESSAGE_S = 10.0  # for the first message of a later stream: one that got lost on the way never comes
_CHANGE_S = 0.5  # to wait for news of a change of their number, before a request that was refused for it is sent again
_MOST_MADE = 4096  # ids that were made here and not used yet

Answer = TypeVar("Answer")


class Deployment:
    """Connections of one client. Belongs to the event loop it was made in."""

    def __init__(self, address: str, options: ClientOptions, credentials: Credentials) -> None:
        self._address = address
        self._options = options
        self._credentials = credentials
        self._connections: dict[int, Connection] = {}
        self._router = ShardRouter()
        self._asking: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[pb.GetStatsResponse] | None = None
        self._are_known = asyncio.Event()  # or were asked for in vain
        self._deferred: set[DeferredSession] = set()  # whose shard is not known yet
        self._made: OrderedDict[str, None] = OrderedDict()  # ids that no request has yet
        self._have_changed = asyncio.Event()  # replaced when it is set: the numbers of shards
        self._is_closed = False
        self._is_assumed = False  # that there is one shard: nobody has said so
        self._following: grpc.aio.Call | None = None  # that tells of the shards

    @property
    def first(self) -> Connection:
        """The connection to shard 0, which every deployment has."""
        return self.connection_to(0)

    def connection_to(self, shard: int) -> Connection:
        """The connection to a shard, made at first use."""
        if self._is_closed:
            raise RuntimeError(CLOSED)
        if shard not in self._connections:
            on_later_leader = None if shard else self._follow_anew
            self._connections[shard] = Connection(
                self._address, self._options, self._credentials, shard, self._move, on_later_leader
            )
        if len(self._router.shards) > 1:
            self._connections[shard].session.expect_leader()
        return self._connections[shard]

    async def any(self) -> Connection:
        """A connection to a shard that can answer for the model, which is the same for all."""
        shards = await self.shards()
        serving = next((shard for shard in shards if shard.leader and shard.num_workers), None)
        return self.connection_to(serving.number if serving is not None else 0)

    async def all(self) -> dict[int, Connection]:
        """The connections to the shards that are led, by number; to all of them if none is."""
        shards = await self.known_shards()
        return {shard.number: self.connection_to(shard.number) for shard in led_shards(shards)}

    async def taking(self) -> dict[int, Connection]:
        """The connections to the shards that are led and take new requests, by number; and to shard 0 in any case."""
        led = {0: self.first, **await self.all()}
        return {number: led[number] for number in led if number < self._router.numbers.num_shards}

    async def of_request(self, request_id: str, call: Callable[[Connection], Awaitable[Answer]]) -> Answer:
        """The answer of the shard that has the request. Raises the error of its own shard if none has it."""
        await self.known_shards()
        numbers = self._router.numbers
        own, *others = places_of_id(request_id, numbers)
        try:
            return await call(self.connection_to(own))
        except NotFoundError:
            if numbers.num_kept == 1 or (numbers.are_settled and names_its_shard(request_id)):
                raise
            # It was submitted by a client that knew of other shards.
            for other in dict.fromkeys([*others, *range(numbers.num_kept)]):
                if other != own:
                    with suppress(NotFoundError):
                        return await call(self.connection_to(other))
            raise

    @property
    def has_choice(self) -> bool:
        """True if several shards take new requests."""
        return self._router.numbers.num_shards > 1

    def new_id(
        self,
        prompt: Prompt,
        *,
        salt: str | None,
        tenant: str | None,
        prefix: str = "",
        session_key: str | None = None,
    ) -> str:
        """The id of a new request, which decides where it goes.

        That is the shard of its session, where its beginning is known, or where least runs. While the shards are not
        known the id names the session, whose shard follows from their number later.
        """
        shard = session = None
        if self.has_choice:
            shard = self._router.choose_shard(prompt, salt=salt, tenant=tenant, session_key=session_key)
        elif session_key and not self._router.shards:
            session = session_number(session_key, tenant)
        made = new_request_id(shard, prefix, session=session)
        self._made[made] = None
        if len(self._made) > _MOST_MADE:
            self._made.popitem(last=False)
        return made

    def open(self, entry: Entry) -> "Session | DeferredSession":
        """Submits a request, or attaches to it, as soon as its shard is known."""
        numbers, request_id = self._router.numbers, entry.request.request_id
        entry.is_new = entry.submission is not None and self._made.pop(request_id, 0) is None
        if not self._router.shards or self._must_be_found(entry):
            return self._defer(entry, self._session_of(entry))
        entry.shards_version = 0 if entry.is_new else numbers.version
        session = self.connection_to(shard_of_id(request_id, numbers.num_shards)).session
        session.open(entry)
        return session

    async def close(self) -> None:
        """Ends all sessions, then all channels. Calls that wait raise RuntimeError."""
        self._is_closed = True
        for deferred in list(self._deferred):
            deferred.close()
        asking = {task for task in (self._asking, self._looking) if task is not None}
        for task in asking:
            task.cancel()
        if asking:
            await asyncio.wait(asking)
            self._are_known.set()  # it may have ended before it began
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))

    def _defer(self, entry: Entry, finding: Coroutine[Any, Any, Session]) -> DeferredSession:
        deferred = DeferredSession(finding, entry, self._deferred.discard)
        self._deferred.add(deferred)
        return deferred

    def _move(self, entry: Entry, error: ShardsChangedError) -> DeferredSession:
        """Takes over a request that a shard has refused, since the number of shards has changed."""
        return self._defer(entry, self._session_after(entry, error))

    async def _session_after(self, entry: Entry, error: ShardsChangedError) -> Session:
        """The session of the shard that takes a request, once the change that the error spoke of is known here."""
        now_s = asyncio.get_running_loop().time()
        entry.moved_since_s = entry.moved_since_s or now_s
        if now_s - entry.moved_since_s > self._options.reconnect_timeout_s:
            raise error
        if self._router.numbers.version >= error.version:
            await asyncio.sleep(error.retry_after_s)  # it is the server that does not know, or we do by now
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHANGE_S):
                    await self._have_changed.wait()
        entry.is_new = False
        return await self._session_of(entry)

    async def _session_of(self, entry: Entry) -> Session:
        """The session of the shard that a request is in or goes to; waits while a shard cannot say.

        Raises the error of shard 0 at once if that was never reached: whoever asked it has waited for that.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._options.reconnect_timeout_s
        if entry.submission is not None:
            await self._ask_before_submission(entry, until_s)
        while True:
            try:
                if entry.submission is None:
                    return (await self._connection_of(entry.request.request_id)).session
                return await self._place(entry, self._router.numbers)
            except RetryableError as error:
                is_gone = not self._router.shards and isinstance(error, UnavailableError)
                if is_gone or loop.time() + error.retry_after_s > min(until_s, entry.deadline_s or until_s):
                    raise
                await asyncio.sleep(error.retry_after_s)

    async def _ask_before_submission(self, entry: Entry, until_s: float) -> None:
        """Ask for the shards; until they are known, if the id is not new: shard 0 alone may not be where it belongs.

        Raises the error of shard 0 if that cannot be reached, RequestExpiredError, UnavailableError.
        """
        if entry.is_new:
            await self.shards()
            return
        try:
            async with asyncio.timeout_at(entry.deadline_s):
                await self._ask_until_known(until_s)
        except TimeoutError:
            passed = f"the deadline passed before the server at {self._address} said which shards there are"
            raise RequestExpiredError(f"request {entry.request.request_id}: {passed}") from None

    async def _ask_until_known(self, until_s: float) -> None:
        while True:
            try:
                await self.known_shards()
            except RetryableError as error:
                await self.shards()  # a server may have come that answers this, and does not lead yet
                is_gone = isinstance(error, UnavailableError)
                if not self._router.shards and (is_gone or asyncio.get_running_loop().time() > until_s):
                    raise
                await asyncio.sleep(0 if self._router.shards else error.retry_after_s)
            if self._router.shards:
                return
            if asyncio.get_running_loop().time() > until_s:
                raise UnavailableError(f"the server at {self._address} does not say which shards there are")
            await asyncio.sleep(_AGAIN_S)

    async def _connection_of(self, request_id: str) -> Connection:
        """The connection to the shard of a request that was submitted, perhaps to another one than its id says."""
        await self.known_shards()
        numbers = self._router.numbers
        if numbers.are_settled and (numbers.num_kept == 1 or names_its_shard(request_id)):
            return self.connection_to(shard_of_id(request_id, numbers.num_shards))

        async def find(connection: Connection) -> Connection:
            await connection.call(connection.inference.GetRequest, pb.GetRequestRequest(request_id=request_id))
            return connection

        return await self.of_request(request_id, find)

    async def _place(self, entry: Entry, numbers: ShardNumbers) -> Session:
        """The session of the shard that has a request already, else of the one that it belongs to by these numbers."""
        request_id = entry.request.request_id
        own, *others = places_of_id(request_id, numbers)
        if entry.is_new:
            return self.connection_to(own).session
        look = pb.GetRequestRequest(request_id=request_id, shards_version=numbers.version)
        for other in others:
            connection = self.connection_to(other)
            with suppress(NotFoundError):
                await connection.call(connection.inference.GetRequest, look)
                own = other
                break
        entry.shards_version = numbers.version
        return self.connection_to(own).session

    def _must_be_found(self, entry: Entry) -> bool:
        """True of a request that may be in another shard than the one that takes its id now."""
        numbers, request_id = self._router.numbers, entry.request.request_id
        if entry.submission is not None:
            return not entry.is_new and bool(numbers.former) and len(places_of_id(request_id, numbers)) > 1
        return not (numbers.are_settled and (numbers.num_kept == 1 or names_its_shard(request_id)))

    async def known_shards(self) -> list[Shard]:
        """Every shard, for calls whose answer would be wrong of shard 0 alone: a server that was slow is asked again.

        Raises the error of shard 0 if that cannot be reached.
        """
        shards = await self.shards()
        if not self._router.shards:
            await self._look_for_leader()
            shards = await self.shards()
        return shards

    async def _look_for_leader(self) -> None:
        """Make one call that a leader answers, for all who wait for it. Raises its error."""
        if self._looking is None or self._looking.done():
            call = self.first.call(self.first.inference.GetStats, pb.GetStatsRequest())
            self._looking = asyncio.create_task(call, name="quire-look")
            self._looking.add_done_callback(lambda look: look.cancelled() or look.exception())  # who asked may be gone
        await asyncio.shield(self._looking)

    async def shards(self) -> list[Shard]:
        """Every shard, as it was described lately; shard 0 alone if nobody says which there are."""
        if not self._router.shards:
            if self._asking is None or self._asking.done():
                self._are_known.clear()
                self._asking = asyncio.create_task(self._follow(), name="quire-shards")
            await self._are_known.wait()
        return self._router.shards or [Shard(number=0)]

    async def _follow(self) -> None:
        """Follows the shards while there are several or can be; returns if there is one, or if nobody says."""
        while True:
            is_over = False
            try:
                is_over = await self._read_topology()
            except grpc.aio.AioRpcError as error:
                if error.code() in _TELL_NONE and not self._router.shards:
                    self._router.record_shards([Shard(number=0)])
                    self._is_assumed = True
            except asyncio.CancelledError:
                if is_cancelled():
                    raise  # else the connection was given up, or left: the shards are followed over the new one
            except LookupError:  # a damaged status, which gRPC does not know
                pass
            except TimeoutError:
                if self._router.shards:  # every call of this connection may be broken since a bit has flipped
                    self.first.renew()
            finally:
                self._are_known.set()
            is_several = len(self._router.shards) > 1 or bool(self._router.numbers.version)
            if is_over or not (is_several or self._is_assumed):
                return
            await asyncio.sleep(_ASSUMED_AGAIN_S if self._is_assumed else _AGAIN_S)

    def _follow_anew(self) -> None:
        """Follow the shards over another stream, to the server that is current by now."""
        if self._following is not None:
            self._following.cancel()

    async def _read_topology(self) -> bool:
        """Reads messages until the stream ends. Returns True if there is one shard, and never another one."""
        connection = self.first
        async with asyncio.timeout(_FIRST_MESSAGE_S if self._router.shards else _ASK_S) as limit:
            await connection.find_reachable()
            while await self._read_messages(connection, limit):
                if limit.when() is None:
                    limit.reschedule(asyncio.get_running_loop().time() + _FIRST_MESSAGE_S)
        return len(self._router.shards) == 1 and not self._router.numbers.version

    async def _read_messages(self, connection: Connection, limit: asyncio.Timeout) -> bool:
        """Read messages until the stream ends; True, after a moment, if one was damaged: it is to be opened anew."""
        self._following = call = connection.cluster.Topology(cluster_pb2.TopologyRequest())
        async for message in call:
            if not _can_be(message):
                call.cancel()
                await asyncio.sleep(_ANEW_S)
                return True
            limit.reschedule(None)
            self._is_assumed = False
            self._record_shards(message)
            for each in message.cached:
                self._router.record_cached(each.shard, unpack_hashes(each.hashes))
            self._are_known.set()
        return False

    def _record_shards(self, message: cluster_pb2.TopologyResponse) -> None:
        numbers = ShardNumbers(
            version=message.version,
            num_shards=message.num_shards or len(message.shards),
            num_kept=len(message.shards),
            former=tuple(message.former_num_shards),
        )
        has_changed = numbers != self._router.numbers
        self._router.record_shards([_shard(each, numbers.num_shards) for each in message.shards], numbers)
        if has_changed:
            self._have_changed.set()
            self._have_changed = asyncio.Event()


def _can_be(message: cluster_pb2.TopologyResponse | None) -> bool:
    """False if no server says so: a bit has flipped on the way, and requests would go to shards that are not there.

    None: gRPC could not read it.
    """
    if message is None:
        return False
    numbers = [shard.number for shard in message.shards]
    return (
        0 < len(numbers) <= MOST_SHARDS
        and numbers == list(range(len(numbers)))
        and message.num_shards <= len(numbers)
        and all(0 < number <= MOST_SHARDS for number in message.former_num_shards)
    )


def _shard(message: cluster_pb2.Shard, num_shards: int) -> Shard:
    return Shard(
        number=message.number,
        leader=message.leader,
        epoch=message.epoch,
        num_workers=message.num_workers,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_uncomputed_tokens=message.num_uncomputed_tokens,
        takes_requests=message.number < num_shards,
    )
