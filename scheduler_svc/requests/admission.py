"""Admission of requests: check a submission, tokenise its prompt, make it durable, or refuse it with the reason.

Two submissions with one request_id are one request, also while the first is still on its way in; if their bodies
differ, the second waits until the first has the id or is refused. Each runs in a task of its own, so that a client that
hangs up leaves nothing half done. Knows nothing of calls on admitted requests: see `request_control`.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import structlog

from common.arrays import pack_int32
from common.bounds import MOST_TOKEN_IDS
from common.native_faults import CONTROL_FLOW
from quire.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    UnavailableError,
)
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.store import FencedError
from scheduler_svc.requests.live.cache_summary import CacheSummary
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.live_request import LiveRequest, RequestTimes
from scheduler_svc.requests.live.new_request import new_live_request
from scheduler_svc.requests.live.output_stream import OutputStream
from scheduler_svc.requests.live.readers import Readers
from scheduler_svc.requests.params.grammar_check import GrammarCheck
from scheduler_svc.requests.params.prompt_checks import check_prompt_logprobs
from scheduler_svc.requests.params.prompt_tokenizer import PromptTokenizer, prompt_of
from scheduler_svc.requests.params.request_params import (
    ValidatedParams,
    bound_by_step,
    request_digest,
    settle_length,
    validate,
)
from scheduler_svc.requests.params.sampling_defaults import with_defaults
from scheduler_svc.requests.params.served_model import ServedModel
from scheduler_svc.requests.queue_limits import AdmissionLimits, QueueLimits
from scheduler_svc.requests.recovery.recovery import Recovery
from scheduler_svc.requests.request_control import ADMISSION_TIMEOUT_S, RequestControl, Submission, read_record
from scheduler_svc.requests.shard_rule import ShardRule

log = structlog.get_logger()

MOST_TIMEOUT_S = 100 * 365 * 24 * 3600  # as good as none, and its deadline still fits int64 nanoseconds
MOST_PARAMETER_BYTES = 1024 * 1024  # of a request in the journal, beside 4 for each token of its prompt


class _Asked(NamedTuple):
    """Submission that was found valid."""

    request: pb.GenerateRequest  # with the model's defaults
    params: ValidatedParams
    digest: bytes  # of what was asked for
    model: ServedModel
    timeout_s: float | None  # of the call
    shards_version: int  # by which its shard was chosen; 0: it does not say


class Admission:
    """Way in for new requests. `closed`: refuses new ones. `num_refused`: submissions that raised."""

    def __init__(
        self,
        engine: Engine,
        limits: AdmissionLimits,
        readers: Readers,
        recovery: Recovery,
        control: RequestControl,
        *,
        timeout_s: float = ADMISSION_TIMEOUT_S,
        cached: CacheSummary | None = None,
        shard_rule: ShardRule | None = None,
    ) -> None:
        """Take the engine, and what limits it.

        Args:
            engine: runs what is admitted.
            limits: of the queue.
            readers: of outputs.
            recovery: of the requests of earlier schedulers.
            control: finds requests by their ids.
            timeout_s: longest wait for the journal to acknowledge a request.
            cached: told of prompts where there are several shards, if any.
            shard_rule: of the shard that this scheduler leads; None: there can be but one.
        """
        self.model: ServedModel | None = None
        self.num_refused = 0
        self.closed = False
        self.readers = readers
        self.recovery = recovery
        self.tokenizer = PromptTokenizer()
        self._grammars = GrammarCheck()
        self._engine = engine
        self.limits = limits
        self._timeout_s = timeout_s
        self._control = control
        self._cached = cached
        self._shard_rule = shard_rule
        self._submissions = control.submissions
        self._queue = QueueLimits(engine, limits)
        self._entering: dict[LiveRequest, None] = {}  # found to fit, and not yet in the queue

    @property
    def is_in_use(self) -> bool:
        """True if any request is live or on its way in: the model must not change."""
        if self._submissions or self._engine.live:
            return True
        return self.model is not None and self.recovery.is_rebuilding(self.model.fingerprint)

    @property
    def entering(self) -> Collection[LiveRequest]:
        """Requests that were found to fit, and wait for the journal's acknowledgement."""
        return self._entering.keys()

    def serve_model(self, model: ServedModel) -> None:
        """Serve this model from now on; requests of earlier schedulers that wait for it go on."""
        self.model = model
        self._engine.vocab_size = model.limits.vocab_size
        self.recovery.model_known(model)

    async def close(self) -> None:
        """Refuse new requests; return when each submission on its way in is admitted or refused."""
        self.closed = True
        while self._submissions:
            await asyncio.wait([each.task for each in self._submissions.values()])

    def require_model(self) -> ServedModel:
        """The model, or UnavailableError while no worker has described one."""
        if self.model is None:
            raise UnavailableError("no worker has registered yet; start one, or wait while it loads")
        return self.model

    def in_flight_admissions_still_fit(self) -> bool:
        """True if each request on its way in still fits as it did when checked. The queue does not know them yet."""
        scheduler = self._engine.scheduler
        return not self.recovery.num_waiting and all(
            live.num_prompt_tokens + live.max_tokens
            <= scheduler.workers.max_tokens_that_fit(live.num_prompt_tokens, live.params.num_sequences)
            for live in self._entering
        )

    async def submit(
        self, request: pb.GenerateRequest, timeout_s: float | None, shards_version: int = 0
    ) -> tuple[OutputStream, pb.Accepted]:
        """Admit a request, or attach to the one that has its id.

        Raises the errors of `validate` and `settle_length`, AlreadyExistsError, OverloadedError, UnavailableError, and
        ShardsChangedError if its shard was chosen by another version of their number.
        """
        try:
            if (journaled := self.recovery.find(request.request_id)) is not None:
                _check_same(journaled.request_id, journaled.admission.request_digest, request_digest(request))
                return await self._control.attach(journaled.request_id)
            if self.model is None and await self._is_recorded(request):
                return await self._control.attach(request.request_id)
            if self.model is None and self._shard_rule is not None:  # a shard that is removed gets no workers any more
                self._shard_rule.check_new(request.request_id, shards_version)
            model = self.require_model()
            digest = request_digest(request)  # of what was asked for, whatever the model's defaults are meanwhile
            request = with_defaults(request, model.sampling_defaults)
            params = validate(
                request, model.limits, draw_seed=lambda: secrets.randbits(64), make_id=lambda: str(uuid.uuid4())
            )
            stream, is_new = await self._known_or_new(_Asked(request, params, digest, model, timeout_s, shards_version))
        except CONTROL_FLOW:
            raise
        except BaseException:
            self.num_refused += 1
            raise
        accepted = pb.Accepted()
        accepted.CopyFrom(stream.accepted)
        accepted.attached = stream.accepted.attached or not is_new
        return stream, accepted

    async def _known_or_new(self, asked: _Asked) -> tuple[OutputStream, bool]:
        request_id, digest = asked.params.request_id, asked.digest
        while (submission := self._submissions.get(request_id)) is not None and submission.digest != digest:
            # Nobody has the id yet: the other may be refused, and this one the request of a finished record.
            await asyncio.wait([submission.task])
        live = self._engine.live.get(request_id)
        if live is not None:
            _check_same(request_id, live.digest, digest)
            return live.stream, False
        is_new = submission is None
        if submission is None:
            submission = Submission(digest, asyncio.create_task(self._admit(asked)))
            self._submissions[request_id] = submission
            submission.task.add_done_callback(partial(self._remove_submission, request_id))
        try:
            return await asyncio.shield(submission.task), is_new
        finally:
            del submission  # a refusal is in its task, whose traceback has this frame: the two would keep each other

    def _remove_submission(self, request_id: str, task: "asyncio.Task[OutputStream]") -> None:
        del self._submissions[request_id]
        if not task.cancelled():
            task.exception()  # retrieved: each waiter gets it too

    async def _admit(self, asked: _Asked) -> OutputStream:
        request, params, digest, model, timeout_s, shards_version = asked
        times = RequestTimes(arrived_ns=time.monotonic_ns(), arrived_unix_ns=time.time_ns())
        timeouts_s = [each for each in (timeout_s, _seconds(params.timeout_ms)) if each is not None]
        deadline_s = times.arrived_ns / 1e9 + min(*timeouts_s, MOST_TIMEOUT_S) if timeouts_s else None
        self._check_store()
        if request.request_id and (record := await self._record_in_time(request.request_id)) is not None:
            _check_record(request.request_id, record, digest)
            return self._control.recorded.output_of(record)
        self._check_open()
        if self._shard_rule is not None:
            self._shard_rule.check_new(params.request_id, shards_version)
        self._queue.check_newcomer(params.tenant, params.priority, deadline_s)
        self._queue.enter(params.tenant)
        live = None
        try:
            live = await self._prepare(asked, times, deadline_s)
            self._entering[live] = None
            self._queue.enter(params.tenant, live.num_prompt_tokens)
            await self._make_durable(live, request, model)
        finally:
            self._queue.leave(params.tenant, live.num_prompt_tokens if live is not None else 0)
            if live is not None:
                del self._entering[live]
        return live.stream

    async def _prepare(self, asked: _Asked, times: RequestTimes, deadline_s: float | None) -> LiveRequest:
        """Try the grammar, tokenise the prompt and settle the length."""
        request, params, digest, model, *_ = asked
        await self._grammars.check(params.sampling.grammar, model, params.tenant)
        token_ids = await self.tokenizer.token_ids(prompt_of(request), model, params.tenant)
        self._check_open()
        if params.sampling.num_prompt_logprobs is not None:
            check_prompt_logprobs(len(token_ids), params.sampling.num_prompt_logprobs)
        self._queue.check_tokens(params.tenant, len(token_ids))
        scheduler = self._engine.scheduler
        fit = scheduler.workers.max_tokens_that_fit(len(token_ids), params.num_sequences)
        max_tokens = settle_length(
            params,
            len(token_ids),
            model.limits,
            fit,
            longest_prompt_that_fits=partial(scheduler.workers.longest_prompt_that_fits, params.num_sequences),
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
            max_tokens=bound_by_step(params, len(token_ids), max_tokens),
            deadline_s=deadline_s,
            tokenizer=model.tokenizer,
            wanted=request.output,
            times=times,
        )

    def _check_open(self) -> None:
        if self.closed:
            raise UnavailableError("the scheduler is shutting down")
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
                "the journal's store does not answer; nothing was accepted, so send the request again"
            )
        try:
            durable.result()
        except FencedError as error:
            raise UnavailableError(
                "another scheduler has taken over; nothing was accepted here, so send the request to that one"
            ) from error
        if self._cached is not None and (self._shard_rule is None or self._shard_rule.is_several):
            self._cached.record_admitted(request, live.group.sequences[0])
        self._start(live)

    def _withdraw(self, live: LiveRequest, durable: "asyncio.Future[None]") -> None:
        """End a request that became durable only after its client was told to send it again.

        The request never owned its request_id: the client may have used it again already.
        """
        if not durable.cancelled() and durable.exception() is None:
            self._engine.withdraw(live)

    def _start(self, live: LiveRequest) -> None:
        self.readers.start_grace_period(live)
        self._engine.start(live)
        log.debug(
            "request accepted",
            request_id=live.request_id,
            prompt_tokens=live.num_prompt_tokens,
            max_tokens=live.max_tokens,
            num_sequences=live.params.num_sequences,
        )

    async def _is_recorded(self, request: pb.GenerateRequest) -> bool:
        """True if this request has ended and has a record, which needs no worker. Raises AlreadyExistsError."""
        record = await self._record_in_time(request.request_id) if request.request_id else None
        if record is not None:
            _check_record(request.request_id, record, request_digest(request))
        return record is not None

    async def _record_in_time(self, request_id: str) -> journal_pb2.RequestRecord | None:
        """Record of a request that has ended. Raises UnavailableError if the store does not answer."""
        reading = asyncio.ensure_future(read_record(self._engine.records, request_id))
        try:
            if await self._engine.journal.health.is_in_time(reading):
                return reading.result()
        finally:
            reading.cancel()
        self._engine.journal.probe_soon()
        raise _silent_store()


def _silent_store() -> UnavailableError:
    return UnavailableError("the journal's store does not answer; nothing can be accepted until it does")


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _check_journaled_bytes(entry: journal_pb2.Admission) -> None:
    """Raise InvalidRequestError if the journal entry of the request is above the bound for one request."""
    most = 4 * MOST_TOKEN_IDS + MOST_PARAMETER_BYTES
    if (num_bytes := entry.ByteSize()) > most:
        raise InvalidRequestError(f"the request takes {num_bytes:,} bytes in the journal: give at most {most:,}")


def _check_record(request_id: str, record: journal_pb2.RequestRecord, digest: bytes) -> None:
    if record.deleted:
        raise AlreadyExistsError(
            f"request_id {request_id!r} belongs to a request whose record was deleted; choose a new id"
        )
    _check_same(request_id, record.request_digest, digest)


def _check_same(request_id: str, digest: bytes, other: bytes) -> None:
    if digest != other:
        raise AlreadyExistsError(
            f"request_id {request_id!r} belongs to a request with another prompt or other parameters; choose a new id, "
            "or send the same request again to read its output"
        )
