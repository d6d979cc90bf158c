"""Registers the worker with the leading scheduler again and again, which renews its lease.

Every address, configured or named by a scheduler, has its own task, so that one that does not answer delays no other.
Worker and scheduler may start in either order. Changes are logged, attempts are not.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc
import structlog

from common.rpc import CLUSTER_MESSAGE_BYTES
from quire.address import split_addresses
from quire.credentials import Credentials, Metadata
from quire.errors import DataLossError, NotLeaderError, QuireError, UnavailableError
from quire.host_names import HostNames
from quire.rpc import SHARD_KEY, channel_options, error_of, is_cancelled, readable
from quire.v1 import cluster_pb2 as pb
from quire.v1 import cluster_pb2_grpc
from worker_svc.service.followed_epoch import FORGET_AFTER_S, FollowedEpoch

_ATTEMPT_TIMEOUT_S = 2.0
_PATIENCE_WITHOUT_LEADER_S = 0.5  # at the end, in case a new leader is just taking over
_RETRY_S = 0.1  # between attempts at each address while this worker has no leader
_STANDBY_RETRY_S = 0.5  # between attempts at the other addresses while it has one: one of them may become the leader
_SHORTEST_PAUSE_S = 0.05
_RESOLVE_S = 2.0  # between two resolutions of the names, and the timeout of each
_DRAIN_POLL_S = 0.05
_MOVE_S = 30.0  # for a drain before a move to another shard
_LEADERLESS_S = 6.0  # several leases: after this a shard's standbys would have led it
# Codes of a leader that does not take this worker; with others nobody has decided anything.
_REFUSALS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
}

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Identity of the worker that registers, and the address where the scheduler reaches it."""

    worker_id: str
    incarnation: str
    address: str
    model_fingerprint: str
    step_key: str = ""  # what schedulers must show to send steps


class _Endpoint:
    """One address of a scheduler, and the task that registers there."""

    def __init__(self, address: str, credentials: Credentials, name: str | None) -> None:
        self.address = address
        self._name = name  # of its host, if it has several addresses
        self._credentials = credentials
        self._open()
        self.task: asyncio.Task[None] | None = None
        self.epoch = 0  # of the leader there; 0: none
        self.pause_s = _RETRY_S

    async def renew_certificates(self, name: str | None) -> None:
        """Open another channel if certificates or the name are others by now: this one may fail for that."""
        if self._credentials.certificates is not self._opened_with or name != self._name:
            outdated, self._name = self.channel, name
            self._open()
            await outdated.close(_ATTEMPT_TIMEOUT_S)

    def _open(self) -> None:
        self._opened_with = self._credentials.certificates
        options = channel_options(CLUSTER_MESSAGE_BYTES)
        self.channel = self._credentials.open_channel(self.address, options, self._name)
        self.stub: cluster_pb2_grpc.ClusterAsyncStub = cluster_pb2_grpc.ClusterStub(self.channel)


class Registration:
    """The lease of one worker with the leader. `on_epoch` gets each new epoch to follow, mostly a higher one."""

    def __init__(
        self,
        schedulers: str,
        identity: WorkerIdentity,
        on_epoch: Callable[[int], None] = lambda epoch: None,
        names: HostNames | None = None,
        *,
        credentials: Credentials | None = None,
        forget_epoch_s: float = FORGET_AFTER_S,
        begin_life: Callable[[], WorkerIdentity] | None = None,
        on_accepted: Callable[[bool], None] = lambda is_accepted: None,
        has_stream: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take addresses, and what to tell there.

        Args:
            schedulers: addresses separated by commas.
            identity: what is registered.
            on_epoch: gets each new epoch to follow; 0: forget it.
            names: resolves host names.
            credentials: key and certificates for the schedulers; None: those of the variables.
            forget_epoch_s: time after which an epoch that nobody confirms is forgotten.
            begin_life: makes the worker a new incarnation, for another shard, which accepts no step of the former one;
                None: it keeps its identity.
            on_accepted: gets True once a leader has taken the worker, and False once one refuses it. While there is no
                leader the last word counts: a takeover, or a scheduler that cannot be reached, is no refusal.
            has_stream: True while a leader has its stream of steps open here: only then has it found nothing wrong, for
                it looks at a worker after it has answered the registration.
        """
        self._credentials = credentials or Credentials()
        self._configured = split_addresses(schedulers)
        self._names = names or HostNames()
        self._resolve_failed = False
        self._identity = identity
        self._on_epoch = on_epoch
        self._endpoints: dict[str, _Endpoint] = {}
        self._resolved: Sequence[str] = self._configured
        self._leader_hint: str | None = None  # address of the leader, as a standby named it
        self._followed = FollowedEpoch(forget_epoch_s)
        self._wake_up = asyncio.Event()
        self._logged_state = ""
        self._is_leaving = False
        self._begin_life = begin_life or (lambda: identity)
        self._on_accepted = on_accepted
        self._has_stream = has_stream
        self._shard: int | None = None  # that this worker serves; None: it has not been told
        self._has_served = False  # as its present incarnation
        self._led_s = 0.0  # when it last had a leader
        self._moving: asyncio.Task[None] | None = None

    async def keep_lease(self) -> None:
        """Registers every third of the lease, until cancelled."""
        try:
            while True:
                await self._resolve_names()
                self._add_endpoints()
                await self._remove_endpoints()
                self._give_up_shard()
                await asyncio.sleep(_RESOLVE_S)
        finally:
            self._names.close()
            if self._moving is not None:
                self._moving.cancel()
            for endpoint in self._endpoints.values():
                if endpoint.task is not None:
                    endpoint.task.cancel()

    def register_now(self) -> None:
        """Registers at every address at once: the leader has gone, or seems to have."""
        for endpoint in self._endpoints.values():
            endpoint.epoch = 0
        self._wake_up.set()
        self._wake_up = asyncio.Event()

    async def leave_scheduler(self, patience_s: float) -> None:
        """Announces the end to the scheduler, and waits at most `patience_s` until no sequence runs here.

        The lease must be kept meanwhile. Without a leader the wait is short.
        """
        self._is_leaving = True
        endpoints = self._endpoints.values()
        endpoint = next((each for each in endpoints if each.epoch), next(iter(endpoints), None))
        if endpoint is None:
            log.info("scheduler not told of draining", reason="no address was tried yet")
            return
        was_led = bool(endpoint.epoch)
        if not was_led:
            patience_s = min(patience_s, _PATIENCE_WITHOUT_LEADER_S)
        try:
            async with asyncio.timeout(patience_s):
                await self._drain_fully(endpoint)
        except grpc.aio.AioRpcError as error:
            reason = error_of(error)
            if reason.code is not grpc.StatusCode.NOT_FOUND:
                is_gone = reason.code is grpc.StatusCode.UNAVAILABLE  # it ended before this worker, as expected
                log.log(_log_level(was_led and not is_gone), "scheduler not told of draining", reason=reason.message)
        except UnavailableError as error:
            log.info("scheduler not told of draining", reason=error.message)
        except TimeoutError:
            log.log(_log_level(was_led), "not drained in time: running requests are computed again elsewhere")

    async def close(self) -> None:
        await asyncio.gather(*(endpoint.channel.close() for endpoint in self._endpoints.values()))

    @property
    def _has_leader(self) -> bool:
        return any(endpoint.epoch for endpoint in self._endpoints.values())

    async def _resolve_names(self) -> None:
        """Resolves the configured names; after a failure the last result counts until the next attempt."""
        self._resolved = await self._names.resolve(self._configured, _RESOLVE_S)
        failure = self._names.failure
        if failure is not None and not self._resolve_failed:
            log.warning("schedulers not looked up", schedulers=self._configured, reason=failure)
        self._resolve_failed = failure is not None

    @property
    def _wanted_addresses(self) -> list[str]:
        """Resolved addresses, and that of the leader if a standby named it."""
        return [*self._resolved, *([self._leader_hint] if self._leader_hint is not None else [])]

    def _add_endpoints(self) -> None:
        """Begins to register at each wanted address that has no task yet."""
        for address in self._wanted_addresses:
            if address not in self._endpoints:
                endpoint = self._endpoints[address] = _Endpoint(
                    address, self._credentials, self._names.name_of(address)
                )
                endpoint.task = asyncio.create_task(self._renew_repeatedly(endpoint), name=f"register at {address}")

    async def _remove_endpoints(self) -> None:
        """Closes endpoints that are not wanted any more. Called by `keep_lease` alone, since it cancels their tasks."""
        wanted = set(self._wanted_addresses)
        unwanted = [each for each in self._endpoints.values() if each.address not in wanted and not each.epoch]
        for endpoint in unwanted:
            del self._endpoints[endpoint.address]
            if endpoint.task is not None:
                endpoint.task.cancel()
        for endpoint in unwanted:
            await endpoint.channel.close()

    async def _renew_repeatedly(self, endpoint: _Endpoint) -> None:
        while True:
            try:
                await self._renew_lease(endpoint)
            except Exception:  # e.g. a damaged status that gRPC does not know; who registers no more is lost
                endpoint.epoch = 0
                log.exception("registration failed", scheduler=endpoint.address)
            retry_s = _STANDBY_RETRY_S if self._has_leader else _RETRY_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake_up.wait(), endpoint.pause_s if endpoint.epoch else retry_s)

    async def _renew_lease(self, endpoint: _Endpoint) -> None:
        """Registers once, and follows the epoch of the answer."""
        asked_for = (self._shard, self._identity)
        try:
            response = await self._register(endpoint)
        except grpc.aio.AioRpcError as error:
            endpoint.epoch = 0
            self._handle_refusal(error.code(), error_of(error))
            await endpoint.renew_certificates(self._names.name_of(endpoint.address))
            return
        except DataLossError:  # it has registered; the next answer says where
            return
        if asked_for != (self._shard, self._identity):
            return  # it has moved to another shard meanwhile
        endpoint.pause_s = max(_SHORTEST_PAUSE_S, response.lease_ms / 3000)
        if not response.epoch:
            self._serve_shard(response.shard)
            return
        if self._shard is None:
            self._shard = response.shard
        self._has_served, self._led_s = True, asyncio.get_running_loop().time()
        others = [other for other in self._endpoints.values() if other is not endpoint]
        if response.epoch < max((other.epoch for other in others), default=0):
            return  # a former leader that does not know of its successor yet
        for other in others:
            other.epoch = 0
        endpoint.epoch = response.epoch
        if self._followed.confirm_epoch(response.epoch, asyncio.get_running_loop().time()):
            self._on_epoch(response.epoch)
        if response.out_of_service or self._has_stream():
            self._on_accepted(not response.out_of_service)
        if response.out_of_service:
            self._log_change("out of service", refused="OUT_OF_SERVICE", reason=response.out_of_service)
        else:
            self._log_change("registered", scheduler=endpoint.address, epoch=response.epoch)
        if response.shard != self._shard and self._moving is None and not self._is_leaving:
            self._moving = asyncio.create_task(self._move(endpoint, response.shard), name="move to another shard")

    def _serve_shard(self, shard: int) -> None:
        """Register for a shard from now on; as a new incarnation if this one has served another."""
        if shard == self._shard:
            return
        log.info("serves shard", shard=shard, worker_id=self._identity.worker_id)
        self._shard, self._led_s = shard, asyncio.get_running_loop().time()
        if self._has_served:
            self._has_served = False
            self._identity = self._begin_life()
            self._followed.forget()
            self._on_epoch(0)
        self.register_now()

    def _give_up_shard(self) -> None:
        """Ask for a shard again if the present one has had no leader for long: another may have work, or it is gone."""
        now_s = asyncio.get_running_loop().time()
        if self._has_leader or self._shard is None:
            self._led_s = now_s
        elif now_s - self._led_s > _LEADERLESS_S:
            self._shard = None

    async def _move(self, endpoint: _Endpoint, shard: int) -> None:
        """Drain where this worker is registered, then register for another shard."""
        try:
            async with asyncio.timeout(_MOVE_S):
                await self._drain_fully(endpoint)
        except (grpc.aio.AioRpcError, TimeoutError, UnavailableError) as error:
            log.info("moves before it is drained: what runs is computed again elsewhere", reason=str(error))
        except Exception:
            log.exception("moves before it is drained")
        self._moving = None
        if not self._is_leaving:
            self._serve_shard(shard)

    def _handle_refusal(self, code: grpc.StatusCode, reason: QuireError) -> None:
        if isinstance(reason, NotLeaderError) and reason.leader not in (None, self._leader_hint):
            self._leader_hint = reason.leader
            self._add_endpoints()
        knows_leader = isinstance(reason, NotLeaderError) and reason.leader is not None
        if not self._has_leader and not knows_leader:
            if code in _REFUSALS and not isinstance(reason, NotLeaderError):
                self._on_accepted(False)
            self._log_change("not registered", refused=code.name, reason=reason.message)

    @property
    def _metadata(self) -> Metadata:
        """Metadata of calls: a process that leads several shards answers for the one that they name."""
        named = () if self._shard is None else ((SHARD_KEY, str(self._shard)),)
        return (*self._credentials.metadata, *named)

    async def _drain_fully(self, endpoint: _Endpoint) -> None:
        """Announces that this worker drains, and returns when no sequence runs here.

        Raises UnavailableError if nobody names the address any more, whose channel is closed then.
        """
        try:
            with suppress(DataLossError):
                await self._register(endpoint)
            while num_running := await self._drain(endpoint):
                if self._logged_state != "draining":
                    log.info("draining", num_running=num_running)
                    self._logged_state = "draining"
                await asyncio.sleep(_DRAIN_POLL_S)
        except (asyncio.CancelledError, grpc.aio.UsageError):  # closed under a call, or between two
            if is_cancelled():
                raise
            raise UnavailableError(f"no scheduler is named at {endpoint.address} any more") from None

    async def _drain(self, endpoint: _Endpoint) -> int:
        """Asks for a drain; returns how many sequences still run here, one if the answer cannot be read."""
        request = pb.DrainWorkerRequest(worker_id=self._identity.worker_id)
        metadata = self._metadata
        answer = await endpoint.stub.DrainWorker(request, timeout=_ATTEMPT_TIMEOUT_S, metadata=metadata)
        return 1 if answer is None else answer.num_running

    async def _register(self, endpoint: _Endpoint) -> pb.RegisterResponse:
        identity = self._identity
        request = pb.RegisterRequest(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            address=identity.address,
            model_fingerprint=identity.model_fingerprint,
            draining=self._is_leaving or self._moving is not None,
            epoch=self._followed.epoch,
            step_key=identity.step_key,
            shard=self._shard,
        )
        return readable(await endpoint.stub.Register(request, timeout=_ATTEMPT_TIMEOUT_S, metadata=self._metadata))

    def _log_change(
        self, event: str, *, scheduler: str = "", refused: str = "", epoch: int = 0, reason: str = ""
    ) -> None:
        """Logs an event unless it was the last one; the text of a refusal, and its scheduler, may vary in between."""
        state = f"{event} {scheduler} {refused if len(self._endpoints) == 1 else ''} {epoch}"
        if state == self._logged_state:
            return
        self._logged_state = state
        if refused:
            log.warning(event, schedulers=self._configured, status=refused, reason=reason)
        else:
            log.info(event, scheduler=scheduler, worker_id=self._identity.worker_id, epoch=epoch)


def _log_level(had_leader: bool) -> int:
    """Level for an end that no scheduler was told of: without a leader it is no warning."""
    return logging.WARNING if had_leader else logging.INFO
