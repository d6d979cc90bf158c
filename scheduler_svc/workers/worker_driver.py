"""Workers in service: taken into the scheduler as they describe themselves, driven, and taken out when they are lost.

Knows nothing of registrations and leases, nor whether a worker may serve.
"""

from collections.abc import Callable, Mapping

import structlog

from quire.errors import FailedPreconditionError, QuireError
from quire.v1 import worker_pb2
from scheduler_svc.core.phases import WorkerRole
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.result_check import ImpossibleAnswerError
from scheduler_svc.requests.params.served_model import differences, served_model, with_shortest_context
from scheduler_svc.requests.prefixes.prefix_keeper import PrefixKeeper
from scheduler_svc.text.tokenizer import ModelTokenizer
from scheduler_svc.workers.block_carrier import BlockCarrier, Peer
from scheduler_svc.workers.decision_time import Decide
from scheduler_svc.workers.latest import Latest
from scheduler_svc.workers.member import Member
from scheduler_svc.workers.placing_budget import max_placed_blocks
from scheduler_svc.workers.step_expectations import StepExpectations
from scheduler_svc.workers.worker_loop import StaleEpochError, WorkerLoop

log = structlog.get_logger()

_ROLES: dict[int, WorkerRole] = {worker_pb2.WORKER_ROLE_PREFILL: "prefill", worker_pb2.WORKER_ROLE_DECODE: "decode"}


class WorkerDriver:
    """One per leader. `members` are those of `Workers`; `on_change` is called when one comes, drains, or goes."""

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        prefixes: PrefixKeeper,
        members: Mapping[str, Member],
        *,
        current_epoch: Callable[[], int],
        send_whole: bool,
        decide: Decide,
        on_change: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._prefixes = prefixes
        self._members = members
        self._current_epoch = current_epoch
        self._send_whole = send_whole
        self._decide = decide
        self._on_change = on_change
        # By worker_id: an incarnation with the expectations of its steps, also while its link is broken.
        self._expectations: Latest[tuple[str, StepExpectations]] = Latest()
        self._carrier = BlockCarrier(
            engine.scheduler.fetches,
            find_peer=self._find_peer,
            current_epoch=current_epoch,
            on_end=self._record_fetch,
            wake_workers=engine.wake_workers,
        )

    @property
    def driven(self) -> list[Member]:
        """Workers that take steps now."""
        return [member for member in self._members.values() if member.is_driven]

    def last_incarnation(self, worker_id: str) -> str:
        """Incarnation that was driven last under this id; empty if none is known."""
        incarnation, _ = self._expectations.get(worker_id) or ("", None)
        return incarnation

    def add(self, member: Member, description: worker_pb2.DescribeResponse, tokenizer: ModelTokenizer | None) -> None:
        """Add a worker as it describes itself. Raises FailedPreconditionError if it does not fit beside the others."""
        try:
            model = served_model(description, self._admission.model, tokenizer)
            member.link.open(member.step_key)
            member.max_model_len = description.model.max_model_len
            self._warn_of_differences(member, description)
            self._add_to_scheduler(member, description)
        except ValueError as error:
            raise FailedPreconditionError(str(error)) from error
        self._admission.serve_model(with_shortest_context(model, self._max_model_lens()))

    async def drive(self, member: Member, fingerprint: str) -> str:
        """Drive a worker that was added until it is lost, and remove it. Returns why it was lost.

        Raises StaleEpochError if it follows a later leader, and QuireError for what else ends it.
        """
        assert member.loop is not None
        lost_by: str | None = None
        try:
            self._prefixes.add_worker(member.worker_id, block_size=member.block_size, fingerprint=fingerprint)
            self._on_change()
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
            moved = self._remove_from_scheduler(member, lost_by)
            if moved:
                log.info("sequences wait again", worker_id=member.worker_id, num_sequences=len(moved))
            self._prefixes.remove_worker(member.worker_id)
            if not self.driven:
                self._engine.waits.record_outage()
            if self._admission.model is not None:
                self._admission.serve_model(with_shortest_context(self._admission.model, self._max_model_lens()))
            self._on_change()
            self._engine.wake_workers()

    def settle_drain(self, member: Member, *, is_draining: bool) -> None:
        """Let a worker drain, or serve again; nothing if it is not in service."""
        if member.loop is None:
            return
        workers = self._engine.scheduler.workers
        if is_draining:
            workers.drain_worker(member.worker_id)
        else:
            workers.undo_drain(member.worker_id)
        num_left = workers.num_sequences_on(member.worker_id)
        log.info(
            "worker drains" if is_draining else "worker serves", worker_id=member.worker_id, num_sequences=num_left
        )
        self._on_change()
        self._engine.wake_workers()

    async def close(self) -> None:
        """End the fetches of blocks that are under way."""
        await self._carrier.close()

    def _warn_of_differences(self, member: Member, description: worker_pb2.DescribeResponse) -> None:
        """Warn of a worker by which outputs, or the model's name after a change of the leader, depend on the worker."""
        known, info, kv_dtype = self._admission.model, description.model, description.pool.dtype
        if known is None or known.fingerprint != info.fingerprint:
            return
        found = differences(description, known)
        if others := sorted({each.kv_dtype for each in self.driven} - {kv_dtype}):
            found.append(f"dtype of keys and values is {kv_dtype}, and {', '.join(others)} of others")
        if found:
            log.warning("worker differs from the others", worker_id=member.worker_id, differences="; ".join(found))

    def _max_model_lens(self) -> list[int]:
        """Context lengths of the workers in service."""
        return [member.max_model_len for member in self.driven]

    def _add_to_scheduler(self, member: Member, description: worker_pb2.DescribeResponse) -> None:
        pool, role = description.pool, _ROLES.get(description.role, "mixed")
        member.block_size, member.kv_dtype = pool.block_size, pool.dtype
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
            role=role,
        )
        decides_late = self._decide == "late" or (self._decide == "auto" and description.device.startswith("cpu"))
        member.loop = WorkerLoop(
            member.worker_id,
            member.link,
            self._engine,
            current_epoch=self._current_epoch,
            send_whole=self._send_whole,
            decides_late=decides_late,
            expectations=self._expect(member),
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
            role=role,
        )

    def _expect(self, member: Member) -> StepExpectations:
        """Return what is known of the times of this process's steps; another process may have to compile first."""
        incarnation, expectations = self._expectations.get(member.worker_id) or ("", StepExpectations())
        is_same_process = incarnation == member.incarnation
        self._engine.scheduler.record_return(member.worker_id, is_same_process=is_same_process)
        if not is_same_process:
            expectations = StepExpectations()
        self._expectations.put(member.worker_id, (member.incarnation, expectations))
        return expectations

    def _remove_from_scheduler(self, member: Member, lost_by: str | None) -> list[Sequence]:
        """Remove a worker. Its steps are not to blame if it was told to end, or for a fault of the link or of ours."""
        given_up = member.given_up
        if given_up is not None:
            lost_by = lost_by or given_up.reason
        if lost_by is None or member.is_leaving or member.link.is_damaged:
            return self._engine.scheduler.workers.remove_worker(member.worker_id)
        is_hung = given_up is not None and given_up.is_hung
        return self._engine.faults.lose_worker(member.worker_id, lost_by, is_proven=is_hung)

    def _find_peer(self, worker_id: str) -> Peer | None:
        member = self._members.get(worker_id)
        if member is None or member.loop is None:
            return None
        return Peer(member.link, member.address, member.incarnation, member.step_key)

    def _record_fetch(self, worker_id: str, num_blocks: int, duration_ns: int) -> None:
        """Learn from a fetch that has ended, and have its group scheduled."""
        member = self._members.get(worker_id)
        if member is not None and member.loop is not None:
            costs = member.loop.costs.learn_fetch(num_blocks, duration_ns)
            if costs is not None:
                self._engine.scheduler.workers.record_costs(worker_id, costs)
        self._engine.wake_workers()
