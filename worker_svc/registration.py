"""Tells the scheduler that this worker is there, over and over: that is its lease.

Whoever starts first waits for the other, so the order of starting never matters. It logs changes, not attempts.
"""

import asyncio
from dataclasses import dataclass

import grpc
import structlog

from common.rpc import CLUSTER_MESSAGE_BYTES, channel_options, error_of
from protos import cluster_pb2 as pb
from protos import cluster_pb2_grpc

_ATTEMPT_TIMEOUT_S = 2.0
_RETRY_S = 0.5
_SHORTEST_PAUSE_S = 0.05
_LOOK_EVERY_S = 0.05

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Who registers, and where the scheduler reaches it."""

    worker_id: str
    incarnation: str
    address: str
    model_fingerprint: str


class Registration:
    """The lease of one worker with one scheduler."""

    def __init__(self, scheduler: str, identity: WorkerIdentity) -> None:
        self._scheduler = scheduler
        self._identity = identity
        self._channel = grpc.aio.insecure_channel(scheduler, options=channel_options(CLUSTER_MESSAGE_BYTES))
        self._stub = cluster_pb2_grpc.ClusterStub(self._channel)
        self._state = ""  # as last logged
        self._is_draining = False

    async def keep(self) -> None:
        """Registers every third of the lease, until cancelled."""
        while True:
            pause_s = await self._renew()
            await asyncio.sleep(pause_s)

    async def leave(self, patience_s: float) -> None:
        """Tells the scheduler that this worker will end, and waits until nothing is left here, while that may be.

        The lease is to be kept meanwhile. Where no scheduler answers there is nothing to wait for.
        """
        self._is_draining = True
        try:
            async with asyncio.timeout(patience_s):
                await self._register()
                while num_running := await self._ask_for_rest():
                    if self._state != "draining":
                        log.info("draining", num_running=num_running)
                        self._state = "draining"
                    await asyncio.sleep(_LOOK_EVERY_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                log.warning("scheduler not told of draining", reason=error_of(error).message)
        except TimeoutError:
            log.warning("not drained in time: what runs here is computed again elsewhere")

    async def close(self) -> None:
        await self._channel.close()

    async def _renew(self) -> float:
        """One sign of life; gives the seconds until the next."""
        try:
            response = await self._register()
        except grpc.aio.AioRpcError as error:
            reason = error_of(error)
            self._note("not registered", refused=error.code().name, reason=reason.message)
            return _RETRY_S
        self._note("registered", epoch=response.epoch)
        return max(_SHORTEST_PAUSE_S, response.lease_ms / 3000)

    async def _ask_for_rest(self) -> int:
        """Sequences that are still here."""
        request = pb.DrainWorkerRequest(worker_id=self._identity.worker_id)
        return (await self._stub.DrainWorker(request, timeout=_ATTEMPT_TIMEOUT_S)).num_running

    async def _register(self) -> pb.RegisterResponse:
        identity = self._identity
        request = pb.RegisterRequest(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            address=identity.address,
            model_fingerprint=identity.model_fingerprint,
            draining=self._is_draining,
        )
        return await self._stub.Register(request, timeout=_ATTEMPT_TIMEOUT_S)

    def _note(self, event: str, *, refused: str = "", epoch: int = 0, reason: str = "") -> None:
        """Logs a change; the wording of a refusal may vary from attempt to attempt."""
        state = f"{event} {refused} {epoch}"
        if state == self._state:
            return
        self._state = state
        if refused:
            log.warning(event, scheduler=self._scheduler, status=refused, reason=reason)
        else:
            log.info(event, scheduler=self._scheduler, worker_id=self._identity.worker_id, epoch=epoch)
