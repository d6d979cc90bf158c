"""Tells the scheduler that leads that this worker is there, over and over: that is its lease.

It knocks at every address that it was given or told of, at each in a task of its own, so that one that does not answer
holds up no other. Whoever starts first waits for the other. It logs changes, not attempts.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc
import structlog

from common.rpc import CLUSTER_MESSAGE_BYTES
from quire.address import resolve, split_addresses
from quire.errors import NotLeaderError, QuireError
from quire.rpc import channel_options, error_of
from quire.v1 import cluster_pb2 as pb
from quire.v1 import cluster_pb2_grpc
from worker_svc.service.followed_epoch import FORGET_AFTER_S, FollowedEpoch

_ATTEMPT_TIMEOUT_S = 2.0
_PATIENCE_WITHOUT_LEADER_S = 0.5  # at the end: nobody keeps what runs here, or somebody takes over in this moment
_KNOCK_S = 0.1  # between attempts at each address while nobody leads this worker
_WATCH_S = 0.5  # and while somebody does, at the addresses of the others: one of them may follow
_SHORTEST_PAUSE_S = 0.05
_RESOLVE_S = 2.0  # between two looks at which addresses the names stand for, and for each look
_LOOK_EVERY_S = 0.05

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Who registers, and where the scheduler reaches it."""

    worker_id: str
    incarnation: str
    address: str
    model_fingerprint: str
    step_key: str = ""  # what schedulers must show to send steps


class _Door:
    """One address, and the task that knocks there."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=channel_options(CLUSTER_MESSAGE_BYTES))
        self.stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(self.channel)
        self.task: asyncio.Task[None] | None = None
        self.epoch = 0  # of the leader behind it; 0: none
        self.pause_s = _KNOCK_S


class Registration:
    """The lease of one worker with whoever leads. `on_epoch` is told each epoch to follow, mostly a higher one."""

    def __init__(
        self,
        schedulers: str,
        identity: WorkerIdentity,
        on_epoch: Callable[[int], None] = lambda epoch: None,
        resolve: Callable[[Sequence[str]], Awaitable[list[str]]] = resolve,
        *,
        forget_epoch_s: float = FORGET_AFTER_S,
    ) -> None:
        """`schedulers` are addresses, with commas between; `resolve` gives all that they stand for."""
        self._given = split_addresses(schedulers)
        self._resolve = resolve
        self._could_not_resolve = False
        self._identity = identity
        self._on_epoch = on_epoch
        self._doors: dict[str, _Door] = {}
        self._resolved = self._given  # what they stand for, as last seen
        self._hint: str | None = None  # where the leader was said to be
        self._followed = FollowedEpoch(forget_epoch_s)
        self._knock_now = asyncio.Event()
        self._state = ""  # as last logged
        self._is_draining = False

    async def keep(self) -> None:
        """Registers every third of the lease, until cancelled."""
        try:
            while True:
                await self._look_up()
                self._open_doors()
                await self._close_doors()
                await asyncio.sleep(_RESOLVE_S)
        finally:
            for door in self._doors.values():
                if door.task is not None:
                    door.task.cancel()

    def knock(self) -> None:
        """Asks everywhere at once: whoever led this worker has gone, or seems to have."""
        for door in self._doors.values():
            door.epoch = 0
        self._knock_now.set()
        self._knock_now = asyncio.Event()

    async def leave(self, patience_s: float) -> None:
        """Tells the scheduler that this worker will end, and waits until nothing is left here, while that may be.

        The lease is to be kept meanwhile. Where no scheduler leads there is little to wait for.
        """
        self._is_draining = True
        door = next((door for door in self._doors.values() if door.epoch), next(iter(self._doors.values()), None))
        if door is None:
            log.info("scheduler not told of draining", reason="none was looked for yet")
            return
        was_led = bool(door.epoch)
        if not was_led:
            patience_s = min(patience_s, _PATIENCE_WITHOUT_LEADER_S)
        try:
            async with asyncio.timeout(patience_s):
                await self._register(door)
                while num_running := await self._ask_for_rest(door):
                    if self._state != "draining":
                        log.info("draining", num_running=num_running)
                        self._state = "draining"
                    await asyncio.sleep(_LOOK_EVERY_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                is_gone = error.code() is grpc.StatusCode.UNAVAILABLE  # it has ended before us, as it should
                log.log(
                    _level(was_led and not is_gone), "scheduler not told of draining", reason=error_of(error).message
                )
        except TimeoutError:
            log.log(_level(was_led), "not drained in time: what runs here is computed again elsewhere")

    async def close(self) -> None:
        await asyncio.gather(*(door.channel.close() for door in self._doors.values()))

    @property
    def _has_leader(self) -> bool:
        return any(door.epoch for door in self._doors.values())

    async def _look_up(self) -> None:
        """What goes wrong with a look may go well with the next; until then the last one counts."""
        try:
            async with asyncio.timeout(_RESOLVE_S):  # a resolver that does not answer is waited for much longer
                self._resolved = await self._resolve(self._given)
            self._could_not_resolve = False
        except Exception as error:
            if not self._could_not_resolve:
                log.warning("schedulers not looked up", schedulers=self._given, reason=repr(error))
            self._could_not_resolve = True

    @property
    def _wanted(self) -> list[str]:
        """Where the names lead to now, and where the leader was said to be."""
        return [*self._resolved, *([self._hint] if self._hint is not None else [])]

    def _open_doors(self) -> None:
        """Knocks at all that are wanted."""
        for address in self._wanted:
            if address not in self._doors:
                door = self._doors[address] = _Door(address)
                door.task = asyncio.create_task(self._knock_at(door), name=f"register at {address}")

    async def _close_doors(self) -> None:
        """Those that are not wanted any more. By `keep` alone: the task of a door would end itself."""
        wanted = set(self._wanted)
        unwanted = [door for door in self._doors.values() if door.address not in wanted and not door.epoch]
        for door in unwanted:
            del self._doors[door.address]
            if door.task is not None:
                door.task.cancel()
        for door in unwanted:
            await door.channel.close()

    async def _knock_at(self, door: _Door) -> None:
        while True:
            await self._renew(door)
            pause_s = door.pause_s if door.epoch else _WATCH_S if self._has_leader else _KNOCK_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._knock_now.wait(), pause_s)

    async def _renew(self, door: _Door) -> None:
        """One sign of life."""
        try:
            response = await self._register(door)
        except grpc.aio.AioRpcError as error:
            door.epoch = 0
            self._refused(error.code().name, error_of(error))
            return
        door.pause_s = max(_SHORTEST_PAUSE_S, response.lease_ms / 3000)
        others = [other for other in self._doors.values() if other is not door]
        if response.epoch < max((other.epoch for other in others), default=0):
            return  # it has been followed, and does not know it yet
        for other in others:
            other.epoch = 0
        door.epoch = response.epoch
        if self._followed.note(response.epoch, asyncio.get_running_loop().time()):
            self._on_epoch(response.epoch)
        if response.out_of_service:
            self._note("out of service", refused="OUT_OF_SERVICE", reason=response.out_of_service)
        else:
            self._note("registered", scheduler=door.address, epoch=response.epoch)

    def _refused(self, code: str, reason: QuireError) -> None:
        if isinstance(reason, NotLeaderError) and reason.leader not in (None, self._hint):
            self._hint = reason.leader
            self._open_doors()
        knows_where = isinstance(reason, NotLeaderError) and reason.leader is not None
        if not self._has_leader and not knows_where:
            self._note("not registered", refused=code, reason=reason.message)

    async def _ask_for_rest(self, door: _Door) -> int:
        """Sequences that are still here."""
        request = pb.DrainWorkerRequest(worker_id=self._identity.worker_id)
        return (await door.stub.DrainWorker(request, timeout=_ATTEMPT_TIMEOUT_S)).num_running

    async def _register(self, door: _Door) -> pb.RegisterResponse:
        identity = self._identity
        request = pb.RegisterRequest(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            address=identity.address,
            model_fingerprint=identity.model_fingerprint,
            draining=self._is_draining,
            epoch=self._followed.epoch,
            step_key=identity.step_key,
        )
        return await door.stub.Register(request, timeout=_ATTEMPT_TIMEOUT_S)

    def _note(self, event: str, *, scheduler: str = "", refused: str = "", epoch: int = 0, reason: str = "") -> None:
        """Logs a change; the wording of a refusal, and who of several refuses, may vary from attempt to attempt."""
        state = f"{event} {scheduler} {refused if len(self._doors) == 1 else ''} {epoch}"
        if state == self._state:
            return
        self._state = state
        if refused:
            log.warning(event, schedulers=self._given, status=refused, reason=reason)
        else:
            log.info(event, scheduler=scheduler, worker_id=self._identity.worker_id, epoch=epoch)


def _level(was_led: bool) -> int:
    """Of what is said of an end that nobody was told of: without a leader there was nobody."""
    return logging.WARNING if was_led else logging.INFO
