"""Recovery: a new leader reads the journal and continues every request that has no end there.

Tokens are known at once, text only with the model's tokenizer, which comes with the first worker: until then requests
wait here, and so do their readers. A request can be ended meanwhile.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import structlog

from common.native_faults import CONTROL_FLOW
from common.waits import end_tasks
from quire.errors import FailedPreconditionError
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.store import JournalDamagedError, Store
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.readers import Readers
from scheduler_svc.requests.live.request_record import record_of
from scheduler_svc.requests.params.served_model import ServedModel
from scheduler_svc.requests.recovery.journal_reading import find_needed, replay_journal
from scheduler_svc.requests.recovery.journal_replay import BegunReplay, JournaledPin, JournaledRequest
from scheduler_svc.requests.recovery.rebuilding import rebuild_request
from scheduler_svc.requests.recovery.textless_record import record_without_text

log = structlog.get_logger()

SLICE_S = 0.005  # of rebuilding, before the event loop has its turn
RETURN_GRACE_S = 30.0  # for clients to come back to a scheduler that was away


class JournalContents(Enum):
    """SETTLED: the last leader was ready, so it had restated what it knew. EMPTY: not so, and there was no request."""

    SETTLED = "settled"
    UNSETTLED = "unsettled"
    EMPTY = "empty"


@dataclass(slots=True, eq=False)
class Waiting:
    """Request that waits for its model. `gone` is set when it waits no more: it is live, or has a record."""

    journaled: JournaledRequest
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    deadline: asyncio.TimerHandle | None = None
    ended: journal_pb2.Finish | None = None  # decided here, though perhaps not yet durable
    end_durable: asyncio.Event = field(default_factory=asyncio.Event)  # that of `ended`
    lost_by: str = ""  # why it cannot be rebuilt

    @property
    def has_ended(self) -> bool:
        return self.ended is not None or self.journaled.finish is not None

    @property
    def number(self) -> int:
        """Number by which the journal names it."""
        return self.journaled.number

    @property
    def tenant(self) -> str:
        return self.journaled.admission.request.tenant

    @property
    def fingerprint(self) -> str:
        """Fingerprint of its model."""
        return self.journaled.admission.model_fingerprint


class Recovery:
    """One per process. Owned by the event loop's thread."""

    def __init__(self, engine: Engine, readers: Readers, *, model_patience_s: float = 30.0) -> None:
        """`model_patience_s`: longest wait for a worker of the requests' model while one of another model is there."""
        self.num_recovered = 0  # requests that were continued
        self.pins: list[JournaledPin] = []  # of earlier leaders, for `PrefixKeeper`
        self._engine = engine
        self._readers = readers
        self._model_patience_s = model_patience_s
        self._patient_until_s = 0.0
        self._waiting: dict[str, Waiting] = {}  # by request_id
        self._model: ServedModel | None = None
        self._rebuilding: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their model."""
        return len(self._waiting)

    @property
    def waiting(self) -> Collection[Waiting]:
        """Requests that wait for their model."""
        return self._waiting.values()

    @property
    def num_paused(self) -> int:
        """Number of waiting requests that are paused."""
        return sum(each.journaled.is_paused and not each.has_ended for each in self._waiting.values())

    @property
    def num_unserved(self) -> int:
        """Number of waiting requests that a worker would serve: neither paused nor ended."""
        return sum(not each.journaled.is_paused and not each.has_ended for each in self._waiting.values())

    def is_rebuilding(self, fingerprint: str) -> bool:
        """True if a request waits for this model."""
        return any(each.fingerprint == fingerprint for each in self._waiting.values())

    def find(self, request_id: str) -> JournaledRequest | None:
        """Waiting request of this id; None if there is none."""
        waiting = self._waiting.get(request_id)
        return None if waiting is None else waiting.journaled

    async def read(self, store: Store, begun: BegunReplay | None = None) -> JournalContents:
        """Read what earlier leaders left; they are fenced. Call it after `Journal.open` and before `Journal.begin`.

        `begun`: what was read of the journal before. Unless the journal was settled, its last leader, or one before it,
        may know more than it has. Raises JournalDamagedError if an entry is damaged, JournalLostError if
        the journal is lost meanwhile, FencedError if another one begins to lead, StoreUnavailableError.
        """
        started_s = time.monotonic()
        try:
            replay, num_entries = await replay_journal(self._engine.journal, begun)
        except JournalDamagedError as error:
            raise JournalDamagedError(
                f"{error}: restore the store from a copy, or begin a new journal with another `deployment` (what was "
                "accepted and has not ended stays unfinished in this one)"
            ) from error
        if begun is not None and (not begun.is_whole or replay.is_cut_short):
            self._engine.journal.rewrite_on_begin()
        self._engine.skip_sequence_numbers(replay.highest_number)
        needed, ends = await find_needed(replay, store)
        for each in needed:
            self._add_waiting(each)
        self.pins = list(replay.pins.values())
        for pin in self.pins:
            self._engine.journal.keep_entry(pin, pin.entry_id, pin.restate)
        if ends:
            self._engine.journal.append(finishes=ends)
        self._patient_until_s = time.monotonic() + self._model_patience_s
        if replay.num_unreadable:
            log.error("requests of an older version are not recovered", num_requests=replay.num_unreadable)
        log.info(
            "journal read",
            num_entries=num_entries,
            num_live=sum(each.journaled.finish is None for each in self._waiting.values()),
            num_unrecorded=sum(each.journaled.finish is not None for each in self._waiting.values()),
            num_pins=len(self.pins),
            seconds=round(time.monotonic() - started_s, 3),
        )
        if replay.is_settled:
            return JournalContents.SETTLED
        return JournalContents.UNSETTLED if replay.highest_number else JournalContents.EMPTY

    def forget_pins(self) -> None:
        """Need the pins of earlier leaders no longer."""
        for pin in self.pins:
            self._engine.journal.forget(pin)

    async def settled(self, request_id: str) -> None:
        """Return when the request waits no more."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            await waiting.gone.wait()

    def response(self, request_id: str) -> pb.GetRequestResponse | None:
        """Answer of GetRequest for a waiting request, without output, which has no text yet; else None."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return None
        admission = waiting.journaled.admission
        state = pb.REQUEST_STATE_PAUSED if waiting.journaled.is_paused else pb.REQUEST_STATE_WAITING
        return pb.GetRequestResponse(
            request_id=request_id,
            state=pb.REQUEST_STATE_RUNNING if waiting.has_ended else state,
            usage=pb.Usage(prompt_tokens=waiting.journaled.num_prompt_tokens),
            created_unix_ns=admission.arrived_unix_ns,
            seed=admission.request.sampling.seed,
            tenant=admission.request.tenant,
            annotation=admission.request.annotation,
        )

    def end(
        self, request_id: str, state: pb.RequestState.ValueType, error: str = ""
    ) -> pb.RequestState.ValueType | None:
        """End a waiting request, unless it has ended. Returns its state; None if it does not wait."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return None
        finish = waiting.ended or waiting.journaled.finish
        if finish is None:
            finish = waiting.ended = journal_pb2.Finish(
                sequence=waiting.journaled.number, state=state, error=error, finished_unix_ns=time.time_ns()
            )
            self._engine.journal.append(finishes=[finish], on_durable=partial(self._end_is_durable, waiting))
        return finish.state

    async def cancel(self, request_id: str) -> pb.RequestState.ValueType | None:
        """Cancel a waiting request as `end` does; returns when the end is durable."""
        waiting = self._waiting.get(request_id)
        state = self.end(request_id, pb.REQUEST_STATE_CANCELLED)
        if waiting is not None and waiting.journaled.finish is None:
            await waiting.end_durable.wait()
        return state

    async def set_paused(self, request_id: str, *, is_paused: bool) -> bool:
        """Pause or resume a waiting request; returns when that is durable. False: it does not wait.

        Raises FailedPreconditionError if it has ended.
        """
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return False
        if waiting.has_ended:
            raise FailedPreconditionError(f"request {request_id!r} has ended")
        waiting.journaled.is_paused = is_paused
        await self._engine.journal_pause(waiting.journaled.number, is_paused=is_paused)
        return True

    def check_model(self, worker_id: str, fingerprint: str) -> None:
        """Raise FailedPreconditionError if requests wait for other models, and none for that of a first worker.

        After `model_patience_s` the worker is accepted: see `model_known`.
        """
        awaited = Counter(each.fingerprint for each in self._waiting.values())
        left_s = self._patient_until_s - time.monotonic()
        if awaited and fingerprint not in awaited and left_s > 0:
            raise FailedPreconditionError(
                f"worker {worker_id!r} has another model than the {sum(awaited.values())} requests that were accepted "
                "before the scheduler was restarted; start a worker of theirs (same model folder, same Quire), "
                f"or they are failed in {left_s:.0f} s"
            )

    def model_known(self, model: ServedModel) -> None:
        """Rebuild the requests of this model in a task; requests of other models fail after `model_patience_s`."""
        is_new = self._model is None or self._model.fingerprint != model.fingerprint
        self._model = model
        if is_new and self._waiting:
            if self._rebuilding is not None:
                self._rebuilding.cancel()
            self._rebuilding = asyncio.create_task(self._rebuild_all(model), name="recovery")

    async def close(self) -> None:
        """Leave the waiting requests to the next leader."""
        for waiting in self._waiting.values():
            if waiting.deadline is not None:
                waiting.deadline.cancel()
        if self._rebuilding is not None:
            await end_tasks(self._rebuilding)

    def _add_waiting(self, journaled: JournaledRequest) -> None:
        self._engine.journal.keep_entry(journaled.number, journaled.entry_id, journaled.restate)
        waiting = self._waiting[journaled.request_id] = Waiting(journaled)
        admission = journaled.admission
        if journaled.finish is None and admission.HasField("deadline_unix_ns"):
            left_s = (admission.deadline_unix_ns - time.time_ns()) / 1e9
            waiting.deadline = asyncio.get_running_loop().call_later(
                left_s, self.end, journaled.request_id, pb.REQUEST_STATE_EXPIRED
            )

    def _end_is_durable(self, waiting: Waiting) -> None:
        waiting.journaled.finish = waiting.ended
        waiting.end_durable.set()
        if waiting.lost_by:
            self._close_without_text(waiting)
        elif self._model is not None and waiting.fingerprint == self._model.fingerprint:
            self._rebuild(waiting, self._model)

    async def _rebuild_all(self, model: ServedModel) -> None:
        """Rebuild the requests of this model; after `model_patience_s` give up those of others."""
        await self._rebuild_those_of(model)
        await asyncio.sleep(self._patient_until_s - time.monotonic())
        for each in list(self._waiting.values()):
            if each.fingerprint != model.fingerprint:
                self._give_up(
                    each, "the model for which the request was accepted is not served any more: send it again"
                )

    async def _rebuild_those_of(self, model: ServedModel) -> None:
        """Rebuild in the order of service, ended ones last; the first run while others are rebuilt."""
        started_s = time.monotonic()
        waiting = [each for each in self._waiting.values() if each.fingerprint == model.fingerprint]
        waiting.sort(key=_rank)
        slice_ends_s = started_s + SLICE_S
        for each in waiting:
            self._rebuild(each, model)
            if time.monotonic() > slice_ends_s:
                await asyncio.sleep(0)
                slice_ends_s = time.monotonic() + SLICE_S
        if waiting:
            log.info("requests recovered", num_requests=len(waiting), seconds=round(time.monotonic() - started_s, 3))

    def _rebuild(self, waiting: Waiting, model: ServedModel) -> None:
        """Rebuild a waiting request. Does nothing if it was rebuilt before, or while its end is not durable."""
        journaled = waiting.journaled
        if waiting.gone.is_set() or (waiting.ended is not None and journaled.finish is None):
            return
        try:
            request = rebuild_request(journaled, model)
        except CONTROL_FLOW:
            raise
        except BaseException:  # the tokenizer's library may panic
            log.exception("request not rebuilt", request_id=journaled.request_id)
            self._give_up(
                waiting,
                "the request could not be read back from the journal, the scheduler's log says why: send it again",
            )
            return
        if request.ended_state is not None:
            self._record(journaled, record_of(request))
        else:
            self._engine.journal.restate_by(journaled.number, request.restate)
            self._engine.start(request, is_paused=journaled.is_paused)
            self._readers.start_grace_period(request, at_least_s=RETURN_GRACE_S)
            self.num_recovered += 1
        self._remove_waiting(waiting)

    def _give_up(self, waiting: Waiting, reason: str) -> None:
        """Give up a request that will never have text. It fails if it has not ended."""
        log.warning("request not recovered", request_id=waiting.journaled.request_id, reason=reason)
        waiting.lost_by = reason
        self.end(waiting.journaled.request_id, pb.REQUEST_STATE_FAILED, reason)
        if waiting.journaled.finish is not None:
            self._close_without_text(waiting)

    def _close_without_text(self, waiting: Waiting) -> None:
        journaled = waiting.journaled
        assert journaled.finish is not None
        finish = journal_pb2.Finish()
        finish.CopyFrom(journaled.finish)
        finish.error = finish.error or f"its text is lost: {waiting.lost_by}"
        self._record(journaled, record_without_text(journaled, finish))
        self._remove_waiting(waiting)

    def _record(self, journaled: JournaledRequest, record: journal_pb2.RequestRecord) -> None:
        number = journaled.number
        assert journaled.finish is not None
        self._engine.records.put(
            journaled.request_id,
            record.SerializeToString(),
            lambda _: self._engine.journal.forget(number),
            tenant=journaled.admission.request.tenant,
            ended_unix_ns=journaled.finish.finished_unix_ns,
            replaces=journaled.replaces_record,
        )

    def _remove_waiting(self, waiting: Waiting) -> None:
        if waiting.deadline is not None:
            waiting.deadline.cancel()
        del self._waiting[waiting.journaled.request_id]
        waiting.gone.set()


def _rank(waiting: Waiting) -> tuple[bool, int, int]:
    """Order of rebuilding: ended requests last, since only late readers ask for them, and there may be many."""
    journaled = waiting.journaled
    return journaled.finish is not None, journaled.admission.request.priority, journaled.number
