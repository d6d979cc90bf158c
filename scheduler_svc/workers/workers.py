"""Registered workers: they register, are dialled back, and are given up when they are gone.

Workers are not configured: they register, and a silent one is forgotten. A worker whose answers cannot be believed, or
that follows a scheduler unknown to the store, is put out of service; no request is blamed for it.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

import structlog

from common.native_faults import CONTROL_FLOW
from common.waits import end_tasks
from quire.errors import FailedPreconditionError, NotFoundError, OverloadedError, QuireError, UnavailableError
from quire.v1 import cluster_pb2
from scheduler_svc.journal.store import FencedError, StoreUnavailableError
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.prefixes.prefix_keeper import PrefixKeeper
from scheduler_svc.workers.decision_time import Decide
from scheduler_svc.workers.latest import Latest
from scheduler_svc.workers.member import GivenUp, Member
from scheduler_svc.workers.memory_log import MemoryLog
from scheduler_svc.workers.model_policy import ModelPolicy
from scheduler_svc.workers.out_of_service import OutOfService
from scheduler_svc.workers.tokenizer_maker import TokenizerMaker
from scheduler_svc.workers.worker_checks import WorkerChecks
from scheduler_svc.workers.worker_driver import WorkerDriver
from scheduler_svc.workers.worker_link import WorkerLink
from scheduler_svc.workers.worker_loop import StaleEpochError, SupersededError

log = structlog.get_logger()

LEASE_MS = 6000
WATCH_EVERY_S = 0.5
MAX_WORKERS = 1024


class Workers:
    """Members by worker_id. `on_change` gets True while any takes new requests; `on_fatal` ends the process."""

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        prefixes: PrefixKeeper,
        *,
        epoch: int,
        send_whole: bool,
        decide: Decide = "auto",
        on_change: Callable[[bool], None],
        on_fatal: Callable[[QuireError], None],
        only_model: str | None = None,
        model_patience_s: float = 30.0,
        make_link: Callable[[str], WorkerLink] = WorkerLink,
        longer: Callable[[float], AbstractAsyncContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        """`longer` holds our lease for so many seconds more, while the process may be blocked."""
        self.members: dict[str, Member] = {}
        self.epoch = epoch  # that steps are sent at; one that rises counts for the next step of each worker
        self._engine = engine
        self._on_change = on_change
        self._on_fatal = on_fatal
        self._make_link = make_link
        self._memory_log = MemoryLog()
        self._drained: Latest[str] = Latest()  # by worker_id: the incarnation that was drained, connected or not
        self._out_of_service = OutOfService()
        policy = ModelPolicy(admission, only_model=only_model, patience_s=model_patience_s)
        self._checks = WorkerChecks(policy, has_workers=lambda: bool(self.driven))
        self._tokenizers = TokenizerMaker(lambda: admission.model, longer)
        self._closed = False
        self._driver = WorkerDriver(
            engine,
            admission,
            prefixes,
            self.members,
            current_epoch=lambda: self.epoch,
            send_whole=send_whole,
            decide=decide,
            on_change=self._record_change,
        )
        engine.on_worker_at_fault = self._put_at_fault

    def register(self, request: cluster_pb2.RegisterRequest) -> str:
        """Register a worker, or renew its lease. Returns the reason why it gets no work; empty if it does.

        Raises FailedPreconditionError if this worker cannot serve here.
        """
        if self._closed:
            raise UnavailableError("the scheduler is shutting down", 1.0)
        reason = self._out_of_service.reason(request, self.epoch)
        member = self.members.get(request.worker_id)
        if member is not None and member.incarnation == request.incarnation and (member.task is not None or reason):
            member.seen_s = time.monotonic()
            if member.task is None:
                member.out_of_service = reason
            if request.draining and not member.is_leaving:
                member.is_leaving = True
                self._driver.settle_drain(member, is_draining=True)
            return member.out_of_service
        if member is not None and member.loop is not None:
            raise FailedPreconditionError(
                f"worker_id {request.worker_id!r} is held by a live worker at {member.address}; choose another"
            )
        if request.draining:
            if member is not None:
                self._forget(member)
            return ""
        if member is None and len(self.members) >= MAX_WORKERS:
            self._make_room()
        self._checks.check_registration(request)
        if self._drained.get(request.worker_id) != request.incarnation:
            self._drained.discard(request.worker_id)
        if member is not None:
            self._forget(member)
        member = Member(
            worker_id=request.worker_id,
            address=request.address,
            incarnation=request.incarnation,
            link=self._make_link(request.address),
            step_key=request.step_key,
            seen_s=time.monotonic(),
            is_drained=request.worker_id in self._drained,
            out_of_service=reason,
        )
        self.members[request.worker_id] = member
        if reason:
            log.warning("worker out of service", worker_id=member.worker_id, address=member.address, reason=reason)
        else:
            member.task = asyncio.create_task(self._drive(member), name=f"worker {member.worker_id}")
        return reason

    def _make_room(self) -> None:
        """Give up the oldest worker that takes no steps. Raises OverloadedError if there is none."""
        idle = next((member for member in self.members.values() if member.loop is None), None)
        if idle is None:
            raise OverloadedError(f"{len(self.members)} workers are connected, the most that one scheduler takes", 10.0)
        self._forget(idle)

    def _forget(self, member: Member) -> None:
        """Forget a worker that takes no steps: it is not taken in any more."""
        del self.members[member.worker_id]
        if member.task is not None:
            member.task.cancel()

    def drain(self, worker_id: str, *, undo: bool) -> int:
        """Drain a worker, or undo that. Returns the number of sequences still on it.

        A drain outlasts a broken link, until the worker is restarted. Undone for a worker that was put out of service
        for its answers, it serves again after its next registration.
        Raises NotFoundError if it is not connected, FailedPreconditionError to undo for a worker told to end.
        """
        member = self.members.get(worker_id)
        if member is not None and member.out_of_service:
            if undo:
                self._out_of_service.restore(worker_id)
            return 0
        if member is None or member.loop is None:
            raise NotFoundError(f"no worker {worker_id!r} is connected")
        if undo and member.is_leaving:
            raise FailedPreconditionError(f"worker {worker_id!r} was told to end: start it again")
        if undo:
            self._drained.discard(worker_id)
        else:
            self._drained.put(worker_id, member.incarnation)
        member.is_drained = not undo
        self._driver.settle_drain(member, is_draining=not undo)
        return self._engine.scheduler.workers.num_sequences_on(worker_id)

    async def close(self) -> None:
        """Close the links of all workers, for good."""
        self._closed = True
        await self._driver.close()
        await end_tasks(*(member.task for member in self.members.values() if member.task is not None))

    @property
    def driven(self) -> list[Member]:
        """Workers that take steps now."""
        return self._driver.driven

    @property
    def num_in_service(self) -> int:
        """Number of workers that take new requests."""
        return sum(member.is_in_service for member in self.members.values())

    async def watch(self) -> None:
        """Give up silent workers and log the use of memory, every `WATCH_EVERY_S`."""
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(WATCH_EVERY_S)
            now_s = time.monotonic()
            late_s = now_s - began_s - WATCH_EVERY_S
            if late_s > WATCH_EVERY_S:  # this process did not run, and could receive nothing
                for member in self.members.values():
                    member.seen_s += late_s
                    if member.loop is not None:
                        member.loop.excuse_pause(late_s)
            self.give_up_silent(now_s)
            self._memory_log.write_if_due(now_s, self._engine.scheduler)

    def give_up_silent(self, now_s: float) -> None:
        """Give up workers that did not renew their lease, and those that hang in a step."""
        for member in list(self.members.values()):
            if member.given_up is not None:
                continue  # a second cancellation would interrupt its cleaning up
            silent_s = now_s - member.seen_s
            if silent_s > LEASE_MS / 1000:
                given_up = GivenUp(f"no sign of life for {silent_s:.1f} s")
            elif member.loop is not None and member.loop.is_hung(now_s):
                given_up = GivenUp("it hangs in a step", is_hung=True)
            else:
                continue
            if member.task is None:
                del self.members[member.worker_id]
            elif member.task.cancel():
                member.given_up = given_up
                log.warning("worker lost", worker_id=member.worker_id, address=member.address, reason=given_up.reason)

    async def _drive(self, member: Member) -> None:
        link, worker_id, was_taken_in = member.link, member.worker_id, False
        try:
            description = await link.describe(self._tokenizers.known_fingerprint)
            self._checks.check_description(member, description)  # before work is spent on it
            tokenizer = await self._tokenizers.make(description)
            self._checks.check_model(worker_id, description.model.fingerprint)  # again: others have come meanwhile
            self._driver.add(member, description, tokenizer)
            if member.is_leaving or member.is_drained:
                self._driver.settle_drain(member, is_draining=True)
            was_taken_in = True
            self._checks.record_taken_in(worker_id)
            reason = await self._driver.drive(member, description.model.fingerprint)
            if member.is_leaving:
                log.info("worker left", worker_id=worker_id, address=member.address)
            else:
                log.warning("worker lost", worker_id=worker_id, address=member.address, reason=reason)
        except StaleEpochError as error:
            await self._check_follower(member, error)
        except QuireError as error:
            if was_taken_in or self._checks.record_refusal(member, error):
                log.warning("worker not usable", worker_id=worker_id, address=member.address, reason=error.message)
        except CONTROL_FLOW:
            raise
        except BaseException:  # a fault of our own: what ran there waits for a worker again
            log.exception("worker given up", worker_id=worker_id, address=member.address)
        finally:
            try:
                await link.close()
            finally:  # it may be put out of service, or be silent for too long, meanwhile
                member.task = None
                if self.members.get(worker_id) is member and not member.out_of_service:
                    del self.members[worker_id]  # its next registration adds it again

    async def _check_follower(self, member: Member, error: StaleEpochError) -> None:
        """Ask the store if we still lead: the higher epoch that a worker follows may be wrong."""
        try:
            await self._engine.journal.confirm_leading()
        except FencedError as fenced:
            self._on_fatal(SupersededError(f"{error.message}: {fenced}"))
        except StoreUnavailableError as unavailable:
            reason = f"{error.message}, and the store does not say whether there is one: {unavailable.message}"
            log.warning("worker not usable", worker_id=member.worker_id, address=member.address, reason=reason)
        else:
            reason = f"it follows a scheduler of epoch {error.epoch}, which the store does not know: start it again"
            self._put_out_of_service(member.worker_id, reason)

    def _put_at_fault(self, worker_id: str) -> None:
        """Put a worker out of service: another worker computed the request whose answers were not believed."""
        reason = "its answers could not be believed, and another worker computed the same request: start it again"
        self._put_out_of_service(worker_id, reason)

    def _put_out_of_service(self, worker_id: str, reason: str) -> None:
        """Put a worker out of service until it is restarted, or undrained. Its requests move, and are not to blame."""
        incarnation = self._driver.last_incarnation(worker_id)
        if not incarnation:
            return
        self._out_of_service.put(worker_id, incarnation, reason)
        self._engine.scheduler.forgive_worker(worker_id)
        member = self.members.get(worker_id)
        log.error("worker out of service", worker_id=worker_id, reason=reason)
        if member is not None and member.incarnation == incarnation and not member.out_of_service:
            member.out_of_service = reason
            if member.task is not None and member.task is not asyncio.current_task():
                member.task.cancel()
        self._engine.wake_workers()

    def _record_change(self) -> None:
        """Record that a worker has come into service, drains, or has gone."""
        self._checks.record_change()
        self._on_change(self.num_in_service > 0)
