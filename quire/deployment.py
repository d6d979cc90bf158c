"""A client's view of a deployment: its shards, and the connection to each of them.

Most deployments have one shard; then all calls go over its connection. Of several, each is led by a scheduler of its
own, and its connection finds that one, and the next one that leads it, among the same addresses.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import grpc

from quire.connection import Connection
from quire.credentials import Credentials
from quire.deferred_session import DeferredSession
from quire.errors import NotFoundError
from quire.params import ClientOptions
from quire.prompt_beginnings import Prompt, unpack_hashes
from quire.session import Session
from quire.session_entry import Entry
from quire.shard_router import ShardRouter
from quire.shards import Shard, names_its_shard, new_request_id, shard_of_id
from quire.v1 import cluster_pb2
from quire.v1 import inference_pb2 as pb

_ASK_S = 2.0  # for the shards, before a client goes on as if there were one
_AGAIN_S = 0.5  # before the shards are asked for again

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
        self._are_known = asyncio.Event()  # or were asked for in vain
        self._deferred: set[DeferredSession] = set()  # whose shard is not known yet

    @property
    def first(self) -> Connection:
        """The connection to shard 0, which every deployment has."""
        return self._connection_to(0)

    async def any(self) -> Connection:
        """A connection to a shard that can answer for the model, which is the same for all."""
        shards = await self.shards()
        serving = next((shard for shard in shards if shard.leader and shard.num_workers), None)
        return self._connection_to(serving.number if serving is not None else 0)

    async def all(self) -> dict[int, Connection]:
        """The connections to the shards that are led, by number; to all of them if none is."""
        shards = await self.shards()
        led = [shard for shard in shards if shard.leader] or shards
        return {shard.number: self._connection_to(shard.number) for shard in led}

    async def of_request(self, request_id: str, call: Callable[[Connection], Awaitable[Answer]]) -> Answer:
        """The answer of the shard that has the request. Raises the error of its own shard if none has it."""
        num_shards = len(await self.shards())
        own = shard_of_id(request_id, num_shards)
        try:
            return await call(self._connection_to(own))
        except NotFoundError:
            if num_shards == 1 or names_its_shard(request_id):
                raise
            for other in range(num_shards):  # it was submitted by a client that knew of other shards
                if other != own:
                    with suppress(NotFoundError):
                        return await call(self._connection_to(other))
            raise

    @property
    def has_choice(self) -> bool:
        """True if several shards are known."""
        return len(self._router.shards) > 1

    def new_id(self, prompt: Prompt, *, salt: str | None, tenant: str | None, prefix: str = "") -> str:
        """The id of a new request, which decides where it goes: where its beginning is known, or where least runs."""
        if not self.has_choice:
            return new_request_id(None, prefix)
        return new_request_id(self._router.choose_shard(prompt, salt=salt, tenant=tenant), prefix)

    def open(self, entry: Entry) -> "Session | DeferredSession":
        """Submits a request, or attaches to it, as soon as its shard is known."""
        num_shards, request_id = len(self._router.shards), entry.request.request_id
        if not num_shards or (num_shards > 1 and self._must_be_found(entry)):
            deferred = DeferredSession(self._session_of(entry), entry, self._deferred.discard)
            self._deferred.add(deferred)
            return deferred
        session = self._connection_to(shard_of_id(request_id, num_shards)).session
        session.open(entry)
        return session

    async def close(self) -> None:
        """Ends all sessions, then all channels."""
        for deferred in list(self._deferred):
            deferred.close()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))

    async def _session_of(self, entry: Entry) -> Session:
        request_id = entry.request.request_id
        num_shards = len(await self.shards())
        if num_shards > 1 and self._must_be_found(entry):

            async def find(connection: Connection) -> Session:
                await connection.call(connection.inference.GetRequest, pb.GetRequestRequest(request_id=request_id))
                return connection.session

            return await self.of_request(request_id, find)
        return self._connection_to(shard_of_id(request_id, num_shards)).session

    def _must_be_found(self, entry: Entry) -> bool:
        """True of a request that was submitted with an id that names no shard, perhaps to another one than it says."""
        return entry.submission is None and not names_its_shard(entry.request.request_id)

    def _connection_to(self, shard: int) -> Connection:
        if shard not in self._connections:
            self._connections[shard] = Connection(self._address, self._options, self._credentials, shard)
        if self.has_choice:
            self._connections[shard].session.expect_leader()
        return self._connections[shard]

    async def shards(self) -> list[Shard]:
        """Every shard, as it was described lately; shard 0 alone if nobody says which there are."""
        if not self._router.shards:
            if self._asking is None or self._asking.done():
                self._are_known.clear()
                self._asking = asyncio.create_task(self._follow(), name="quire-shards")
            await self._are_known.wait()
        return self._router.shards or [Shard(number=0)]

    async def _follow(self) -> None:
        """Follows the shards while there are several; returns if there is one, or if nobody says."""
        while True:
            is_over = False
            try:
                is_over = await self._read_topology()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    self._router.record_shards([Shard(number=0)])
            except TimeoutError:
                pass
            finally:
                self._are_known.set()
            if is_over or len(self._router.shards) <= 1:
                return
            await asyncio.sleep(_AGAIN_S)

    async def _read_topology(self) -> bool:
        """Reads messages until the stream breaks. Returns True if there is one shard, and nothing more to know."""
        connection = self.first
        async with asyncio.timeout(None if self._router.shards else _ASK_S) as limit:
            await connection.find_reachable()
            async for message in connection.cluster.Topology(cluster_pb2.TopologyRequest()):
                limit.reschedule(None)
                self._router.record_shards([_shard(each) for each in message.shards])
                for each in message.cached:
                    self._router.record_cached(each.shard, unpack_hashes(each.hashes))
                self._are_known.set()
        return len(self._router.shards) == 1


def _shard(message: cluster_pb2.Shard) -> Shard:
    return Shard(
        number=message.number,
        leader=message.leader,
        epoch=message.epoch,
        num_workers=message.num_workers,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_uncomputed_tokens=message.num_uncomputed_tokens,
    )
