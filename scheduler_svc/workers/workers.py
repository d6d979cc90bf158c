"""Registered workers: they register, are dialled back, driven, and given up when they are gone.

Workers are not configured: they register, and a silent one is forgotten. A worker whose answers cannot be believed, or
that follows a scheduler unknown to the store, is put out of service; no request is blamed for it.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

import structlog

from common.native_faults import CONTROL_FLOW
from common.waits import end_tasks
from quire.errors import FailedPreconditionError, NotFoundError, OverloadedError, QuireError, UnavailableError
from quire.v1 import cluster_pb2, worker_pb2
from scheduler_svc.core.phases import WorkerRole
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.journal.store import FencedError, StoreUnavailableError
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.result_check import ImpossibleAnswerError
from scheduler_svc.requests.params.served_model import served_model, with_shortest_context
from scheduler_svc.requests.prefixes.prefix_keeper import PrefixKeeper
from scheduler_svc.text.tokenizer import ModelTokenizer
from scheduler_svc.workers.block_carrier import BlockCarrier, Peer
from scheduler_svc.workers.decision_time import Decide
from scheduler_svc.workers.latest import Latest
from scheduler_svc.workers.memory_log import MemoryLog
from scheduler_svc.workers.model_policy import ModelPolicy
from scheduler_svc.workers.out_of_service import OutOfService
from scheduler_svc.workers.placing_budget import max_placed_blocks
from scheduler_svc.workers.refusals import Refusals
from scheduler_svc.workers.step_expectations import StepExpectations
from scheduler_svc.workers.tokenizer_maker import TokenizerMaker
from scheduler_svc.workers.worker_link import WorkerLink
from scheduler_svc.workers.worker_loop import StaleEpochError, SupersededError, WorkerLoop

log = structlog.get_logger()

LEASE_MS = 6000
WATCH_EVERY_S = 0.5
MAX_WORKERS = 1024
_ROLES: dict[int, WorkerRole] = {worker_pb2.WORKER_ROLE_PREFILL: "prefill", worker_pb2.WORKER_ROLE_DECODE: "decode"}


@dataclass(slots=True, kw_only=True)
class Member:
    """One registered worker."""

    worker_id: str
    address: str
    incarnation: str
    link: WorkerLink
    step_key: str = ""
    task: "asyncio.Task[None] | None" = None  # none while it is out of service
    loop: WorkerLoop | None = None  # while it is being driven
    block_size: int = 0
    max_model_len: int = 0
    seen_s: float
    is_leaving: bool = False  # it was told to end: its hanging up is no loss
    given_up: str | None = None  # why
    out_of_service: str = ""  # why it gets no work; empty: it does

    @property
    def is_driven(self) -> bool:
        """True if it takes steps now."""
        return self.loop is not None


class Workers:
    """Members by worker_id. `on_change` gets True while any worker is driven; `on_fatal` ends the process."""

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
        self._engine = engine
        self._admission = admission
        self._prefixes = prefixes
        self.epoch = epoch  # that steps are sent at; one that rises counts for the next step of each worker
        self._send_whole = send_whole
        self._decide = decide
        self._on_change = on_change
        self._on_fatal = on_fatal
        self._make_link = make_link
        self._memory_log = MemoryLog()
        # By worker_id: the incarnation that was drained, connected or not; and an incarnation with the expectations of
        # its steps, also while its link is broken.
        self._drained: Latest[str] = Latest()
        self._expectations: Latest[tuple[str, StepExpectations]] = Latest()
        self._out_of_service = OutOfService()
        self._refusals = Refusals()
        self._model_policy = ModelPolicy(admission, only_model=only_model, patience_s=model_patience_s)
        self._tokenizers = TokenizerMaker(lambda: admission.model, longer)
        self._closed = False
        self._carrier = BlockCarrier(
            engine.scheduler.fetches,
            find_peer=self._find_peer,
            current_epoch=lambda: self.epoch,
            on_end=self._record_fetch,
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
                self._settle_drain(member, is_draining=True)
            return member.out_of_service
        if member is not None and member.loop is not None:
            raise FailedPreconditionError(
                f"worker_id {request.worker_id!r} is held by a live worker at {member.address}; choose another"
            )
        if request.draining:
            self.members.pop(request.worker_id, None)
            return ""
        if member is None and len(self.members) >= MAX_WORKERS:
            self._make_room()
        self._check_registration(request)
        if self._drained.get(request.worker_id) != request.incarnation:
            self._drained.discard(request.worker_id)
        if member is not None and member.task is not None:
            member.task.cancel()
        member = Member(
            worker_id=request.worker_id,
            address=request.address,
            incarnation=request.incarnation,
            link=self._make_link(request.address),
            step_key=request.step_key,
            seen_s=time.monotonic(),
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
        del self.members[idle.worker_id]
        if idle.task is not None:
            idle.task.cancel()

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
        self._settle_drain(member, is_draining=not undo)
        return self._engine.scheduler.workers.num_sequences_on(worker_id)

    def _settle_drain(self, member: Member, *, is_draining: bool) -> None:
        if member.loop is None:
            return  # it is not in the scheduler yet
        if is_draining:
            self._engine.scheduler.workers.drain_worker(member.worker_id)
        else:
            self._engine.scheduler.workers.undo_drain(member.worker_id)
        num_left = self._engine.scheduler.workers.num_sequences_on(member.worker_id)
        log.info(
            "worker drains" if is_draining else "worker serves", worker_id=member.worker_id, num_sequences=num_left
        )
        self._engine.wake_workers()

    async def close(self) -> None:
        """Close the links of all workers, for good."""
        self._closed = True
        await self._carrier.close()
        await end_tasks(*(member.task for member in self.members.values() if member.task is not None))

    @property
    def driven(self) -> list[Member]:
        """Workers that take steps now."""
        return [member for member in self.members.values() if member.is_driven]

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
                reason = f"no sign of life for {silent_s:.1f} s"
            elif member.loop is not None and member.loop.is_hung(now_s):
                reason = "it hangs in a step"
            else:
                continue
            if member.task is None:
                del self.members[member.worker_id]
            elif member.task.cancel():
                member.given_up = reason
                log.warning("worker lost", worker_id=member.worker_id, address=member.address, reason=reason)

    def _check_registration(self, request: cluster_pb2.RegisterRequest) -> None:
        """Raise FailedPreconditionError for a worker that cannot serve, as far as known without asking it."""
        now_s = time.monotonic()
        if reason := self._refusals.reason(request.worker_id, request.incarnation, now_s):
            raise FailedPreconditionError(reason)
        try:
            self._check_model(request.worker_id, request.model_fingerprint)
        except FailedPreconditionError as error:
            if self._refusals.record_refusal(request.worker_id, request.incarnation, error.message, now_s, holds=False):
                log.warning(
                    "worker refused", worker_id=request.worker_id, address=request.address, reason=error.message
                )
            raise

    def _check_model(self, worker_id: str, fingerprint: str) -> None:
        self._model_policy.check(worker_id, fingerprint, time.monotonic(), has_workers=bool(self.driven))

    async def _drive(self, member: Member) -> None:
        link, worker_id, was_taken_in = member.link, member.worker_id, False
        try:
            known = self._admission.model
            description = await link.describe(known.tokenizer_fingerprint if known else "")
            _check_identity(member, description)
            model = description.model
            self._model_policy.check_configured(worker_id, model.name, model.fingerprint)
            self._check_model(worker_id, model.fingerprint)  # before work is spent on it
            tokenizer = await self._tokenizers.make(description)
            self._check_model(worker_id, model.fingerprint)  # again: others have come meanwhile
            self._add_described(member, description, tokenizer)
            was_taken_in = True
            self._refusals.forget_worker(worker_id)
            reason = await self._run_loop(member, description.model.fingerprint)
            if member.is_leaving:
                log.info("worker left", worker_id=worker_id, address=member.address)
            else:
                log.warning("worker lost", worker_id=worker_id, address=member.address, reason=reason)
        except StaleEpochError as error:
            await self._check_follower(member, error)
        except QuireError as error:
            holds = isinstance(error, FailedPreconditionError)  # else it may go well the next time
            if was_taken_in or self._refusals.record_refusal(
                worker_id, member.incarnation, error.message, time.monotonic(), holds=holds
            ):
                log.warning("worker not usable", worker_id=worker_id, address=member.address, reason=error.message)
        except CONTROL_FLOW:
            raise
        except BaseException:  # a fault of our own: what ran there waits for a worker again
            log.exception("worker given up", worker_id=worker_id, address=member.address)
        finally:
            await link.close()
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
        incarnation, _ = self._expectations.get(worker_id) or ("", None)
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

    def _add_described(
        self, member: Member, description: worker_pb2.DescribeResponse, tokenizer: ModelTokenizer | None
    ) -> None:
        """Add a worker with its description. Raises FailedPreconditionError if it does not fit beside the others."""
        try:
            model = served_model(description, self._admission.model, tokenizer)
            member.link.open(member.step_key)
            member.max_model_len = description.model.max_model_len
            self._add_to_scheduler(member, description)
        except ValueError as error:
            raise FailedPreconditionError(str(error)) from error
        self._admission.serve_model(with_shortest_context(model, self._max_model_lens()))

    def _max_model_lens(self) -> list[int]:
        """Context lengths of the workers in service."""
        return [member.max_model_len for member in self.driven]

    def _add_to_scheduler(self, member: Member, description: worker_pb2.DescribeResponse) -> None:
        pool = description.pool
        member.block_size = pool.block_size
        self._engine.scheduler.workers.add_worker(
            member.worker_id,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            num_seats=description.num_seats,
            max_num_batched_tokens=description.max_batched_tokens or None,
            num_host_blocks=pool.num_host_blocks,
            max_model_len=description.model.max_model_len,
            block_format=pool.block_format,
            max_fetched_blocks=pool.max_fetched_blocks,
            max_placed_blocks=max_placed_blocks(pool.bytes_per_block, description.device),
            role=_ROLES.get(description.role, "mixed"),
        )
        incarnation, expectations = self._expectations.get(member.worker_id) or ("", StepExpectations())
        if incarnation != member.incarnation:  # another process, which may have to compile first
            expectations = StepExpectations()
            self._engine.scheduler.forgive_worker(member.worker_id)
        self._expectations.put(member.worker_id, (member.incarnation, expectations))
        member.loop = WorkerLoop(
            member.worker_id,
            member.link,
            self._engine,
            current_epoch=lambda: self.epoch,
            send_whole=self._send_whole,
            decides_late=self._decide == "late" or (self._decide == "auto" and description.device.startswith("cpu")),
            expectations=expectations,
            carry_started=self._carrier.carry_started,
        )
        log.info(
            "worker ready",
            worker_id=member.worker_id,
            address=member.address,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            num_host_blocks=pool.num_host_blocks,
            device=description.device,
            role=_ROLES.get(description.role, "mixed"),
        )
        if member.is_leaving or member.worker_id in self._drained:
            self._settle_drain(member, is_draining=True)

    def _find_peer(self, worker_id: str) -> Peer | None:
        member = self.members.get(worker_id)
        if member is None or member.loop is None:
            return None
        return Peer(member.link, member.address, member.incarnation, member.step_key)

    def _record_fetch(self, worker_id: str, num_blocks: int, duration_ns: int) -> None:
        """Learn from a fetch that has ended, and have its group scheduled."""
        member = self.members.get(worker_id)
        if member is not None and member.loop is not None:
            costs = member.loop.costs.learn_fetch(num_blocks, duration_ns)
            if costs is not None:
                self._engine.scheduler.workers.record_costs(worker_id, costs)
        self._engine.wake_workers()

    async def _run_loop(self, member: Member, fingerprint: str) -> str:
        assert member.loop is not None
        lost_by: str | None = None
        try:
            self._refusals.reconsider()
            self._prefixes.add_worker(member.worker_id, block_size=member.block_size, fingerprint=fingerprint)
            self._on_change(True)
            self._engine.wake_workers()
            lost_by = await member.loop.run()
            return lost_by
        except (ImpossibleAnswerError, StaleEpochError):
            raise  # the steps in flight are not to blame: they were recorded, or not executed
        except QuireError as error:
            lost_by = str(error)
            raise
        finally:
            member.loop = None
            moved = self._remove_from_scheduler(member, lost_by or member.given_up)
            if moved:
                log.info("sequences wait again", worker_id=member.worker_id, num_sequences=len(moved))
            self._prefixes.remove_worker(member.worker_id)
            if self._admission.model is not None:
                self._admission.serve_model(with_shortest_context(self._admission.model, self._max_model_lens()))
            self._refusals.reconsider()
            if not self.driven:
                self._model_policy.record_last_gone(time.monotonic())
            self._on_change(bool(self.driven))
            self._engine.wake_workers()

    def _remove_from_scheduler(self, member: Member, lost_by: str | None) -> list[Sequence]:
        """Remove a worker. Its steps are not to blame if it was told to end, or for a fault of the link or of ours."""
        if lost_by is None or member.is_leaving or member.link.is_damaged:
            return self._engine.scheduler.workers.remove_worker(member.worker_id)
        return self._engine.faults.lose_worker(member.worker_id, lost_by)


def _check_identity(member: Member, description: worker_pb2.DescribeResponse) -> None:
    """Raise UnavailableError if another worker answers at the address, which may change soon."""
    if (description.worker_id, description.incarnation) != (member.worker_id, member.incarnation):
        raise UnavailableError(
            f"worker {description.worker_id!r}, incarnation {description.incarnation}, answers at {member.address}; "
            "give each worker an address of its own to advertise"
        )
