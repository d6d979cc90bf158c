"""The door: a submission is checked, tokenised and made durable here, or refused with its reason.

The same request_id twice is one request, also while the first submission is still on its way. Everything that
takes time runs in a task of its own, so that a client who hangs up leaves nothing half done.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import Collection, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog

from common.arrays import pack_int32
from common.bounds import MOST_TOKEN_IDS
from common.native_faults import CONTROL_FLOW
from quire.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.store import FencedError
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.live_request import LiveRequest, RequestTimes
from scheduler_svc.requests.live.new_request import new_live_request
from scheduler_svc.requests.live.output_stream import OutputStream
from scheduler_svc.requests.live.readers import Readers
from scheduler_svc.requests.live.request_record import stream_of_record
from scheduler_svc.requests.params.prompt_checks import check_prompt_logprobs
from scheduler_svc.requests.params.prompt_tokenizer import PromptTokenizer, prompt_of
from scheduler_svc.requests.params.request_params import (
    MOST_TIMEOUT_S,
    RequestParams,
    request_digest,
    settle_length,
    validate,
)
from scheduler_svc.requests.params.sampling_defaults import with_defaults
from scheduler_svc.requests.params.served_model import ServedModel
from scheduler_svc.requests.queue_limits import AdmissionLimits, QueueLimits
from scheduler_svc.requests.recovery.journal_replay import JournaledRequest
from scheduler_svc.requests.recovery.recovery import Recovery

log = structlog.get_logger()

T = TypeVar("T")

ADMISSION_TIMEOUT_S = 5.0  # how long a client is kept waiting for the journal, by default
MOST_PARAMETER_BYTES = 1024 * 1024  # that the journal keeps of a request beside 4 for each token of its prompt


class Entering(NamedTuple):
    """A submission on its way in."""

    digest: bytes
    task: "asyncio.Task[OutputStream]"


class Admission:
    """The table of who may come in, and the way to one's request once inside."""

    def __init__(
        self,
        engine: Engine,
        limits: AdmissionLimits,
        readers: Readers,
        recovery: Recovery,
        *,
        timeout_s: float = ADMISSION_TIMEOUT_S,
    ) -> None:
        self.model: ServedModel | None = None
        self.num_refused = 0
        self.closed = False  # to new requests
        self.readers = readers
        self.recovery = recovery
        self.tokenizer = PromptTokenizer()
        self._engine = engine
        self.limits = limits
        self._timeout_s = timeout_s
        self._admitting: dict[str, Entering] = {}  # by request_id
        self._queue = QueueLimits(engine, limits)
        self._entering: dict[LiveRequest, None] = {}  # through the door, found to fit, and not yet in the queue

    @property
    def is_in_use(self) -> bool:
        """Whether any request is live or on its way in: the model must not change."""
        if self._admitting or self._engine.live:
            return True
        return self.model is not None and self.recovery.is_rebuilding(self.model.fingerprint)

    @property
    def entering(self) -> Collection[LiveRequest]:
        """Requests that were found to fit, and wait for the journal to have them."""
        return self._entering.keys()

    def serve(self, model: ServedModel) -> None:
        """From now on this is the model; requests of earlier schedulers that wait for it go on."""
        self.model = model
        self._engine.vocab_size = model.limits.vocab_size
        self.recovery.model_known(model)

    async def close(self) -> None:
        """Lets nobody in any more; returns when those on their way in are in or refused."""
        self.closed = True
        while self._admitting:
            await asyncio.wait([entering.task for entering in self._admitting.values()])
            await asyncio.sleep(0)  # they leave the table by a callback of their own

    def require_model(self) -> ServedModel:
        """The model, or UnavailableError while no worker has described one."""
        if self.model is None:
            raise UnavailableError("no worker has registered yet; start one, or wait while it loads", 1.0)
        return self.model

    def keeps_its_word(self) -> bool:
        """Whether all that is on its way in fits as it did when it was let through: the queue does not know it yet."""
        scheduler = self._engine.scheduler
        return not self.recovery.num_waiting and all(
            live.num_prompt_tokens + live.max_tokens
            <= scheduler.workers.max_tokens_that_fit(live.num_prompt_tokens, live.params.num_sequences)
            for live in self._entering
        )

    async def submit(self, request: pb.GenerateRequest, timeout_s: float | None) -> tuple[OutputStream, pb.Accepted]:
        """Admits a request, or attaches to the one that has its id.

        Raises the errors of `validate` and `settle_length`, AlreadyExistsError, OverloadedError, UnavailableError.
        """
        try:
            if (journaled := self.recovery.find(request.request_id)) is not None:
                return await self._attach_to(journaled, request_digest(request))
            model = self.require_model()
            digest = request_digest(request)  # of what was asked for, whatever the model's defaults are meanwhile
            request = with_defaults(request, model.sampling_defaults)
            params = validate(
                request, model.limits, draw_seed=lambda: secrets.randbits(64), make_id=lambda: str(uuid.uuid4())
            )
            stream, is_new = await self._known_or_new(request, params, digest, model, timeout_s)
        except CONTROL_FLOW:
            raise
        except BaseException:
            self.num_refused += 1
            raise
        accepted = pb.Accepted()
        accepted.CopyFrom(stream.accepted)
        accepted.attached = stream.accepted.attached or not is_new
        return stream, accepted

    async def find(self, request_id: str) -> OutputStream:
        """The output of a request, live or recorded. Raises NotFoundError.

        Of one of an earlier scheduler that waits for its model it comes with that.
        """
        await self.recovery.settled(request_id)
        live = await self._live(request_id)
        if live is not None:
            return live.stream
        return stream_of_record(await self._found_record(request_id))

    async def attach(self, request_id: str, from_positions: Sequence[int] = ()) -> tuple[OutputStream, pb.Accepted]:
        """As `find`, with what its reader is told first.

        A reader that has more than we know of has it from our successor, if there is one: raises UnavailableError.
        Else from an earlier leader, and the store has lost it: it is computed again.
        """
        stream = await self.find(request_id)
        if stream.is_behind(from_positions):
            await self._confirm_leading()
        accepted = pb.Accepted()
        accepted.CopyFrom(stream.accepted)
        accepted.attached = True
        return stream, accepted

    async def response(self, request_id: str) -> pb.GetRequestResponse:
        """What is known of a request. Raises NotFoundError."""
        waiting = self.recovery.response(request_id)
        if waiting is not None:
            return waiting
        live = await self._live(request_id)
        if live is not None:
            return live.to_response()
        return (await self._found_record(request_id)).response

    async def cancel(self, request_id: str) -> pb.RequestState.ValueType:
        """Ends a request, unless it has ended. Returns its state once its end is durable.

        Raises NotFoundError, UnavailableError.
        """
        return await self._in_time(self._cancel(request_id))

    async def pause(self, request_id: str, *, keep_on_host: bool) -> pb.RequestState.ValueType:
        """Pauses a request; returns when that is durable.

        Raises NotFoundError, FailedPreconditionError if it has ended, OverloadedError if too much is paused,
        UnavailableError.
        """
        await self._in_time(self._pause(request_id, keep_on_host))
        return pb.REQUEST_STATE_PAUSED

    async def resume(self, request_id: str) -> pb.RequestState.ValueType:
        """Lets a paused request go on, and returns its state once that is durable. Raises as `pause`."""
        return await self._in_time(self._resume(request_id))

    async def _cancel(self, request_id: str) -> pb.RequestState.ValueType:
        state = await self.recovery.cancel(request_id)
        if state is not None:
            return state
        live = await self._live(request_id)
        if live is None:
            return (await self.response(request_id)).state
        self._engine.end(live, pb.REQUEST_STATE_CANCELLED)
        await live.until_closed()
        return live.ended_state or live.state

    async def _pause(self, request_id: str, keep_on_host: bool) -> None:
        if not await self.recovery.set_paused(request_id, is_paused=True):
            live = await self._unfinished(request_id)
            self._queue.check_pause(live)
            await self._engine.pause(live, keep_on_host=keep_on_host)

    async def _resume(self, request_id: str) -> pb.RequestState.ValueType:
        if not await self.recovery.set_paused(request_id, is_paused=False):
            live = await self._unfinished(request_id)
            await self._engine.resume(live)
            return live.state
        return (await self.response(request_id)).state

    async def _in_time(self, change: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await change
        except TimeoutError:
            raise UnavailableError(
                "the journal's store did not answer in time; repeat the call, which does no harm", 1.0
            ) from None

    async def _unfinished(self, request_id: str) -> LiveRequest:
        live = await self._live(request_id)
        if live is None:
            await self.response(request_id)  # or there is no such request
        if live is None or live.ended_state is not None:
            raise FailedPreconditionError(f"request {request_id!r} has ended")
        return live

    def cancel_live(self, request_id: str) -> None:
        """Ends a request if it is live."""
        live = self._engine.live.get(request_id)
        if live is not None:
            self._engine.end(live, pb.REQUEST_STATE_CANCELLED)

    async def _attach_to(self, journaled: JournaledRequest, digest: bytes) -> tuple[OutputStream, pb.Accepted]:
        _check_same(journaled.request_id, journaled.admission.request_digest, digest)
        return await self.attach(journaled.request_id)

    async def _known_or_new(
        self,
        request: pb.GenerateRequest,
        params: RequestParams,
        digest: bytes,
        model: ServedModel,
        timeout_s: float | None,
    ) -> tuple[OutputStream, bool]:
        live = self._engine.live.get(params.request_id)
        if live is not None:
            _check_same(params.request_id, live.digest, digest)
            return live.stream, False
        entering = self._admitting.get(params.request_id)
        is_new = entering is None
        if entering is None:
            admitting = self._admit(request, params, digest, model, timeout_s)
            entering = self._admitting[params.request_id] = Entering(digest, asyncio.create_task(admitting))
            entering.task.add_done_callback(lambda done: self._admitted(params.request_id, done))
        else:
            _check_same(params.request_id, entering.digest, digest)
        try:
            return await asyncio.shield(entering.task), is_new
        finally:
            del entering  # a refusal is in its task, whose traceback has this frame: the two would keep each other

    def _admitted(self, request_id: str, task: "asyncio.Task[OutputStream]") -> None:
        del self._admitting[request_id]
        if not task.cancelled():
            task.exception()  # seen: whoever waits has it too

    async def _admit(
        self,
        request: pb.GenerateRequest,
        params: RequestParams,
        digest: bytes,
        model: ServedModel,
        timeout_s: float | None,
    ) -> OutputStream:
        times = RequestTimes(arrived_ns=time.monotonic_ns(), arrived_unix_ns=time.time_ns())
        timeouts_s = [each for each in (timeout_s, _seconds(params.timeout_ms)) if each is not None]
        deadline_s = times.arrived_ns / 1e9 + min(*timeouts_s, MOST_TIMEOUT_S) if timeouts_s else None
        self._check_store()
        if request.request_id and (record := await self._record_in_time(request.request_id)) is not None:
            _check_same(request.request_id, record.request_digest, digest)
            return stream_of_record(record)
        self._check_open()
        self._queue.check_newcomer(params.tenant, params.priority, deadline_s)
        self._queue.enter(params.tenant)
        live = None
        try:
            live = await self._prepare(request, params, digest, model, times, deadline_s)
            self._entering[live] = None
            self._queue.enter(params.tenant, live.num_prompt_tokens)
            await self._make_durable(live, request, model)
        finally:
            self._queue.leave(params.tenant, live.num_prompt_tokens if live is not None else 0)
            if live is not None:
                del self._entering[live]
        return live.stream

    async def _prepare(
        self,
        request: pb.GenerateRequest,
        params: RequestParams,
        digest: bytes,
        model: ServedModel,
        times: RequestTimes,
        deadline_s: float | None,
    ) -> LiveRequest:
        """Tokenises the prompt and settles the length."""
        token_ids = await self.tokenizer.token_ids(prompt_of(request), model)
        self._check_open()
        if params.num_prompt_logprobs is not None:
            check_prompt_logprobs(len(token_ids), params.num_prompt_logprobs)
        self._queue.check_tokens(params.tenant, len(token_ids))
        scheduler = self._engine.scheduler
        fit = scheduler.workers.max_tokens_that_fit(len(token_ids), params.num_sequences)
        max_tokens = settle_length(
            params,
            len(token_ids),
            model.limits,
            fit,
            max_sequences_that_fit=scheduler.workers.max_sequences_that_fit(),
            num_pinned_blocks=scheduler.workers.num_pinned_blocks(),
            max_tokens_without_pins=scheduler.workers.max_tokens_that_fit(
                len(token_ids), params.num_sequences, with_pins=False
            ),
        )
        return new_live_request(
            params,
            token_ids,
            digest=digest,
            seq_id=self._engine.number_sequences(params.num_sequences),
            max_tokens=max_tokens,
            deadline_s=deadline_s,
            tokenizer=model.tokenizer,
            wanted=request.output,
            times=times,
        )

    def _check_open(self) -> None:
        if self.closed:
            raise UnavailableError("the scheduler is shutting down", 1.0)
        self._check_store()

    def _check_store(self) -> None:
        if self._engine.journal.health.is_degraded:
            raise _silent_store()

    async def _make_durable(self, live: LiveRequest, request: pb.GenerateRequest, model: ServedModel) -> None:
        settled = pb.GenerateRequest()
        settled.CopyFrom(request)
        settled.ClearField(request.WhichOneof("prompt") or "text")  # prompt_token_ids say it
        settled.request_id = live.request_id
        settled.sampling.seed = live.params.seed
        settled.stopping.max_tokens = live.max_tokens
        entry = journal_pb2.Admission(
            sequence=live.number,
            request=settled,
            prompt_token_ids=pack_int32(live.group.sequences[0].token_ids),
            arrived_unix_ns=live.times.arrived_unix_ns,
            request_digest=live.digest,
            model_fingerprint=model.fingerprint,
        )
        deadline_s = live.group.deadline_s
        if deadline_s is not None:
            entry.deadline_unix_ns = live.times.arrived_unix_ns + round(deadline_s * 1e9) - live.times.arrived_ns
        _check_journaled_bytes(entry)
        live.admission = entry
        durable, trouble = self._engine.journal.admit(entry, live.restate), self._engine.journal.health.trouble
        await asyncio.wait([durable, trouble], timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not durable.done():
            durable.add_done_callback(partial(self._withdraw, live))
            raise UnavailableError(
                "the journal's store does not answer; nothing was accepted, so send the request again", 1.0
            )
        try:
            durable.result()
        except FencedError as error:
            raise UnavailableError(
                "another scheduler has taken over; nothing was accepted here, so send the request to that one", 1.0
            ) from error
        self._start(live)

    def _withdraw(self, live: LiveRequest, durable: "asyncio.Future[None]") -> None:
        """Ends a request that became durable only after its client had been told to come back.

        It never owned its request_id: the client may have come back with it already.
        """
        if not durable.cancelled() and durable.exception() is None:
            self._engine.withdraw(live)

    def _start(self, live: LiveRequest) -> None:
        self.readers.watch(live)
        self._engine.start(live)
        log.debug(
            "request accepted",
            request_id=live.request_id,
            prompt_tokens=live.num_prompt_tokens,
            max_tokens=live.max_tokens,
            num_sequences=live.params.num_sequences,
        )

    async def _live(self, request_id: str) -> LiveRequest | None:
        """The request if it is live, once it is admitted if it is on its way."""
        entering = self._admitting.get(request_id)
        if entering is not None:
            await asyncio.wait([entering.task])
        return self._engine.live.get(request_id)

    async def _found_record(self, request_id: str) -> journal_pb2.RequestRecord:
        """Raises NotFoundError only while we lead: what a successor has accepted is not known here."""
        record = await self._record(request_id)
        if record is not None:
            return record
        await self._confirm_leading()
        raise NotFoundError(f"no request has the id {request_id!r}, or its record is not kept any more")

    async def _confirm_leading(self) -> None:
        try:
            await self._engine.journal.confirm_leading()
        except FencedError as error:
            raise UnavailableError("another scheduler has taken over; ask that one", 1.0) from error

    async def _record(self, request_id: str) -> journal_pb2.RequestRecord | None:
        payload = await self._engine.records.get(request_id)
        return None if payload is None else journal_pb2.RequestRecord.FromString(payload)

    async def _record_in_time(self, request_id: str) -> journal_pb2.RequestRecord | None:
        """Raises UnavailableError where the store is silent."""
        reading = asyncio.ensure_future(self._record(request_id))
        try:
            if await self._engine.journal.health.is_in_time(reading):
                return reading.result()
        finally:
            reading.cancel()
        self._engine.journal.probe_soon()
        raise _silent_store()


def _silent_store() -> UnavailableError:
    return UnavailableError("the journal's store does not answer; nothing can be accepted until it does", 1.0)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _check_journaled_bytes(entry: journal_pb2.Admission) -> None:
    """Raises InvalidRequestError for more than the journal keeps of one request, whatever its fields may hold."""
    most = 4 * MOST_TOKEN_IDS + MOST_PARAMETER_BYTES
    if (num_bytes := entry.ByteSize()) > most:
        raise InvalidRequestError(f"the request takes {num_bytes:,} bytes in the journal: give at most {most:,}")


def _check_same(request_id: str, digest: bytes, other: bytes) -> None:
    if digest != other:
        raise AlreadyExistsError(
            f"request_id {request_id!r} is that of a request with another prompt or other parameters; choose a new id, "
            "or send the same request to read its output"
        )
