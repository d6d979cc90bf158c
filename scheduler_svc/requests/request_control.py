"""Calls on one request by its id: find, attach, describe, cancel, pause, resume, delete.

Looks in three places: live requests, requests of earlier schedulers that wait for their model, and records of ended
ones. Knows nothing of how a request is admitted, but waits for a submission that is on its way in.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from quire.errors import FailedPreconditionError, NotFoundError, UnavailableError
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.records import Records
from scheduler_svc.journal.store import FencedError
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.live_request import LiveRequest
from scheduler_svc.requests.live.output_stream import OutputStream
from scheduler_svc.requests.live.request_record import RecordedOutputs, deleted_record, parsed_record
from scheduler_svc.requests.queue_limits import AdmissionLimits, check_pause
from scheduler_svc.requests.recovery.recovery import Recovery
from scheduler_svc.requests.shard_rule import ShardRule

T = TypeVar("T")

ADMISSION_TIMEOUT_S = 5.0  # default for the longest wait of a client for the journal


class Submission(NamedTuple):
    """Submission on its way in: digest of what was asked for, and the task that admits it."""

    digest: bytes
    task: "asyncio.Task[OutputStream]"


class RequestControl:
    """One per process. `submissions`, by request_id, are on their way in: `Admission` adds and removes them.

    `recorded`: outputs of records, for readers.
    """

    def __init__(
        self,
        engine: Engine,
        recovery: Recovery,
        limits: AdmissionLimits,
        *,
        timeout_s: float = ADMISSION_TIMEOUT_S,
        shard_rule: ShardRule | None = None,
    ) -> None:
        """`timeout_s`: longest wait for the journal to acknowledge a change. `shard_rule`: None: there is one shard."""
        self.submissions: dict[str, Submission] = {}
        self.recorded = RecordedOutputs()
        self._engine = engine
        self._recovery = recovery
        self._limits = limits
        self._timeout_s = timeout_s
        self._shard_rule = shard_rule
        # By request_id, those on their way to the journal and the store; the result: they are there, not given up.
        self._deletions: dict[str, asyncio.Future[bool]] = {}

    def present_ids(self) -> set[str]:
        """Ids of all requests that live, wait for their model, are on their way in, or have a record on its way out."""
        waiting = (each.journaled.request_id for each in self._recovery.waiting)
        return {*self._engine.live, *self.submissions, *waiting, *self._engine.records.pending_ids}

    async def find(self, request_id: str) -> OutputStream:
        """Output of a request, live or recorded. Raises NotFoundError.

        Waits for the model if the request is of an earlier scheduler and not yet rebuilt.
        """
        await self._recovery.settled(request_id)
        live = await self._live(request_id)
        if live is not None:
            return live.stream
        return self.recorded.output_of(await self._found_record(request_id))

    async def attach(self, request_id: str, from_positions: Sequence[int] = ()) -> tuple[OutputStream, pb.Accepted]:
        """Output as of `find`, and the first message for its reader.

        A reader that has more than we do got it either from our successor, then this raises UnavailableError; or from
        an earlier leader, and the store has lost it: then it is computed again.
        """
        stream = await self.find(request_id)
        if stream.is_behind(from_positions):
            await self._confirm_leading()
        accepted = pb.Accepted()
        accepted.CopyFrom(stream.accepted)
        accepted.attached = True
        return stream, accepted

    async def response(self, request_id: str, shards_version: int = 0) -> pb.GetRequestResponse:
        """State, output and timings of a request. With a version, also of one whose record was deleted.

        Raises NotFoundError, and ShardsChangedError if this version of the number of shards is not known here yet.
        """
        if self._shard_rule is not None:
            self._shard_rule.check_known(shards_version)
        waiting = self._recovery.response(request_id)
        if waiting is not None:
            return waiting
        live = await self._live(request_id)
        if live is not None:
            return live.to_response()
        return (await self._found_record(request_id, with_deleted=bool(shards_version))).response

    async def cancel(self, request_id: str) -> pb.RequestState.ValueType:
        """End a request, unless it has ended. Returns its state once its end is durable.

        Raises NotFoundError, UnavailableError.
        """
        return await self._in_time(self._cancel(request_id))

    async def pause(self, request_id: str, *, keep_on_host: bool) -> pb.RequestState.ValueType:
        """Pause a request; returns when the pause is durable.

        Raises NotFoundError, FailedPreconditionError if it has ended, OverloadedError if too much is paused,
        UnavailableError.
        """
        await self._in_time(self._pause(request_id, keep_on_host))
        return pb.REQUEST_STATE_PAUSED

    async def resume(self, request_id: str) -> pb.RequestState.ValueType:
        """Let a paused request go on; returns its state once that is durable. Raises the errors of `pause`."""
        return await self._in_time(self._resume(request_id))

    async def delete_record(self, request_id: str) -> None:
        """Delete the record of a request that has ended; returns once that is durable.

        Raises NotFoundError, FailedPreconditionError if the request has not ended, UnavailableError.
        """
        await self._in_time(self._delete_record(request_id))

    def cancel_live(self, request_id: str) -> None:
        """End a request if it is live."""
        live = self._engine.live.get(request_id)
        if live is not None:
            self._engine.end(live, pb.REQUEST_STATE_CANCELLED)

    def cancel_waiting(self, request_id: str) -> bool:
        """End a request of an earlier scheduler that waits for its model. False: none of this id does."""
        return self._recovery.end(request_id, pb.REQUEST_STATE_CANCELLED) is not None

    async def _cancel(self, request_id: str) -> pb.RequestState.ValueType:
        state = await self._recovery.cancel(request_id)
        if state is not None:
            return state
        live = await self._live(request_id)
        if live is None:
            return (await self.response(request_id)).state
        self._engine.end(live, pb.REQUEST_STATE_CANCELLED)
        await live.until_closed()
        return live.state

    async def _pause(self, request_id: str, keep_on_host: bool) -> None:
        if not await self._recovery.set_paused(request_id, is_paused=True):
            live = await self._unfinished(request_id)
            check_pause(live, self._engine.paused, self._limits)
            await self._engine.pause(live, keep_on_host=keep_on_host)

    async def _resume(self, request_id: str) -> pb.RequestState.ValueType:
        if not await self._recovery.set_paused(request_id, is_paused=False):
            live = await self._unfinished(request_id)
            await self._engine.resume(live)
            return live.state
        return (await self.response(request_id)).state

    async def _delete_record(self, request_id: str) -> None:
        if self._recovery.find(request_id) is not None or await self._live(request_id) is not None:
            raise FailedPreconditionError(f"request {request_id!r} has not ended: cancel it first")
        deleted = self._deletions.get(request_id)
        if deleted is None:
            record = await self._found_record(request_id)
            # Another may have begun meanwhile.
            deleted = self._deletions.get(request_id) or self._begin_deletion(request_id, record)
        if not await asyncio.shield(deleted):  # others may wait for it too
            raise UnavailableError("the store took no record; repeat the call")

    def _begin_deletion(self, request_id: str, record: journal_pb2.RequestRecord) -> "asyncio.Future[bool]":
        ended, deleted = record.response, asyncio.get_running_loop().create_future()
        self._deletions[request_id] = deleted

        def end_deletion(is_kept: bool) -> None:
            del self._deletions[request_id]
            deleted.set_result(is_kept)

        def replace_record(_: object = None) -> None:
            if request_id in self._engine.live:
                end_deletion(True)  # the record has expired meanwhile: the id is another request's
                return
            submission = self.submissions.get(request_id)
            if submission is not None:  # it may be answered from the record, or refused: then the id is no other's
                submission.task.add_done_callback(replace_record)
                return
            self._engine.records.put(
                request_id,
                deleted_record(record).SerializeToString(),
                end_deletion,
                tenant=ended.tenant,
                ended_unix_ns=ended.created_unix_ns + ended.timings.finished_ns,
                replaces=True,
            )

        # The journal goes first: who repeats a call that another leader had begun, and finds the record deleted, may
        # rely on it that no later leader makes it again.
        self._engine.journal.append(deletions=[request_id], on_durable=replace_record)
        return deleted

    async def _in_time(self, change: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await change
        except TimeoutError:
            raise UnavailableError(
                "the journal's store did not answer in time; repeat the call, which does no harm"
            ) from None

    async def _unfinished(self, request_id: str) -> LiveRequest:
        live = await self._live(request_id)
        if live is None:
            await self.response(request_id)  # raises NotFoundError if there is no such request
        if live is None or live.ended_state is not None:
            raise FailedPreconditionError(f"request {request_id!r} has ended")
        return live

    async def _live(self, request_id: str) -> LiveRequest | None:
        """Live request of this id; waits for its submission if that is on its way in."""
        submission = self.submissions.get(request_id)
        if submission is not None:
            await asyncio.wait([submission.task])
        return self._engine.live.get(request_id)

    async def _found_record(self, request_id: str, *, with_deleted: bool = False) -> journal_pb2.RequestRecord:
        """Record of a request that has ended.

        Raises NotFoundError only while we lead: requests that a successor accepted are not known here.
        """
        record = await read_record(self._engine.records, request_id)
        if record is not None and (with_deleted or not record.deleted):
            return record
        await self._confirm_leading()
        raise NotFoundError(f"no request has the id {request_id!r}, or its record is not kept any more")

    async def _confirm_leading(self) -> None:
        try:
            await self._engine.journal.confirm_leading()
        except FencedError as error:
            raise UnavailableError("another scheduler has taken over; ask that one") from error


async def read_record(records: Records, request_id: str) -> journal_pb2.RequestRecord | None:
    """Record of a request that has ended; None if none is kept. Raises FailedPreconditionError if it is damaged."""
    payload = await records.get(request_id)
    return None if payload is None else parsed_record(request_id, payload)
