"""The door: a submission is checked, tokenised and made durable here, or refused with its reason.

The same request_id twice is one request, also while the first submission is still on its way. Everything that
takes time runs in a task of its own, so that a client who hangs up leaves nothing half done.
"""

import asyncio
import secrets
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from common.arrays import pack_int32
from common.errors import AlreadyExistsError, NotFoundError, OverloadedError, UnavailableError
from protos import inference_pb2 as pb
from protos import journal_pb2
from scheduler_svc.requests.engine import Engine
from scheduler_svc.requests.live_request import LiveRequest, RequestTimes, new_live_request, stream_of_record
from scheduler_svc.requests.output_stream import OutputStream
from scheduler_svc.requests.readers import Readers
from scheduler_svc.requests.request_params import RequestParams, request_digest, settle_length, validate
from scheduler_svc.requests.served_model import ServedModel, encode_chat

log = structlog.get_logger()

ADMISSION_TIMEOUT_S = 5.0  # how long a client is kept waiting for the journal


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What the door lets in."""

    max_queue_requests: int
    max_queue_tokens: int


class Admission:
    """The table of who may come in, and the way to one's request once inside."""

    def __init__(self, engine: Engine, limits: AdmissionLimits, readers: Readers) -> None:
        self.model: ServedModel | None = None
        self.num_refused = 0
        self.closed = False
        self.readers = readers
        self._engine = engine
        self._limits = limits
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")
        self._admitting: dict[str, asyncio.Task[OutputStream]] = {}
        self._num_sequences = 0

    @property
    def is_in_use(self) -> bool:
        """Whether any request is live or on its way in: the model must not change."""
        return bool(self._admitting or self._engine.live)

    def require_model(self) -> ServedModel:
        """The model, or UnavailableError while no worker has described one."""
        if self.model is None:
            raise UnavailableError("no worker has registered yet; start one, or wait while it loads", 1.0)
        return self.model

    async def submit(self, request: pb.GenerateRequest, timeout_s: float | None) -> tuple[OutputStream, pb.Accepted]:
        """Admits a request, or attaches to the one that has its id.

        Raises the errors of `validate` and `settle_length`, AlreadyExistsError, OverloadedError, UnavailableError.
        """
        try:
            model = self.require_model()
            params = validate(
                request, model.limits, draw_seed=lambda: secrets.randbits(64), make_id=lambda: str(uuid.uuid4())
            )
            digest = request_digest(request)
            is_new = params.request_id not in self._engine.live and params.request_id not in self._admitting
            stream = await self._known_or_new(request, params, digest, model, timeout_s)
        except Exception:
            self.num_refused += 1
            raise
        live = self._engine.live.get(params.request_id)
        if live is not None and live.digest != digest:
            raise _other_body(params.request_id)
        accepted = pb.Accepted()
        accepted.CopyFrom(stream.accepted)
        accepted.attached = stream.accepted.attached or not is_new
        return stream, accepted

    async def find(self, request_id: str) -> OutputStream:
        """The output of a request, live or recorded. Raises NotFoundError."""
        live = await self._live(request_id)
        if live is not None:
            return live.stream
        record = await self._record(request_id)
        if record is None:
            raise NotFoundError(f"no request has the id {request_id!r}, or its record has expired")
        return stream_of_record(record)

    async def response(self, request_id: str) -> pb.GetRequestResponse:
        """What is known of a request. Raises NotFoundError."""
        live = await self._live(request_id)
        if live is not None:
            return live.to_response()
        record = await self._record(request_id)
        if record is None:
            raise NotFoundError(f"no request has the id {request_id!r}, or its record has expired")
        return record.response

    async def cancel(self, request_id: str) -> pb.RequestState.ValueType:
        """Ends a request, unless it has ended. Returns its state. Raises NotFoundError."""
        live = await self._live(request_id)
        if live is None:
            return (await self.response(request_id)).state
        self._engine.end(live, pb.REQUEST_STATE_CANCELLED)
        return live.ended_state or live.state

    async def _known_or_new(
        self,
        request: pb.GenerateRequest,
        params: RequestParams,
        digest: bytes,
        model: ServedModel,
        timeout_s: float | None,
    ) -> OutputStream:
        live = self._engine.live.get(params.request_id)
        if live is not None:
            return live.stream
        task = self._admitting.get(params.request_id)
        if task is None:
            task = asyncio.create_task(self._admit(request, params, digest, model, timeout_s))
            self._admitting[params.request_id] = task
            task.add_done_callback(lambda done: self._admitted(params.request_id, done))
        return await asyncio.shield(task)

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
        if request.request_id and (record := await self._record(request.request_id)) is not None:
            if record.request_digest != digest:
                raise _other_body(request.request_id)
            return stream_of_record(record)
        self._check_room(0)
        token_ids = await self._token_ids(request, model)
        self._check_room(len(token_ids))
        fit = self._engine.scheduler.max_tokens_that_fit()
        if fit == 0:
            raise UnavailableError("no worker is connected at the moment", 1.0)
        max_tokens = settle_length(params, len(token_ids), model.limits, fit)
        self._num_sequences += 1
        live = new_live_request(
            params,
            token_ids,
            digest=digest,
            seq_id=self._num_sequences,
            max_tokens=max_tokens,
            tokenizer=model.tokenizer,
            wanted=request.output,
            times=times,
        )
        await self._make_durable(live, request, timeout_s)
        return live.stream

    def _check_room(self, num_tokens: int) -> None:
        if self.closed:
            raise UnavailableError("the scheduler is shutting down", 1.0)
        if self._engine.journal.stats.degraded:
            raise UnavailableError("the journal's store does not answer; nothing can be accepted until it does", 1.0)
        num_requests, queued_tokens = self._engine.scheduler.queue_size()
        limits = self._limits
        if num_requests + len(self._admitting) > limits.max_queue_requests:
            raise OverloadedError(f"the queue is full: {num_requests} requests wait; come back later", 1.0)
        if num_tokens and queued_tokens and queued_tokens + num_tokens > limits.max_queue_tokens:
            raise OverloadedError(f"the queue is full: {queued_tokens} prompt tokens wait; come back later", 1.0)

    async def _token_ids(self, request: pb.GenerateRequest, model: ServedModel) -> list[int]:
        if request.WhichOneof("prompt") == "token_ids":
            return list(request.token_ids.ids)
        tokenizer = model.tokenizer
        assert tokenizer is not None, "validate() refuses text without a tokenizer"
        loop = asyncio.get_running_loop()
        if request.WhichOneof("prompt") == "text":
            return await loop.run_in_executor(self._tokenizing, tokenizer.encode, request.text, True)
        return await loop.run_in_executor(self._tokenizing, encode_chat, tokenizer, request.chat)

    async def _make_durable(self, live: LiveRequest, request: pb.GenerateRequest, timeout_s: float | None) -> None:
        settled = pb.GenerateRequest()
        settled.CopyFrom(request)
        settled.request_id = live.request_id
        settled.sampling.seed = live.params.seed
        settled.stopping.max_tokens = live.sequence.max_tokens
        deadlines = [each for each in (timeout_s, _seconds(live.params.timeout_ms)) if each is not None]
        entry = journal_pb2.Admission(
            sequence=live.sequence.seq_id,
            request=settled,
            prompt_token_ids=pack_int32(live.sequence.token_ids),
            arrived_unix_ns=live.times.arrived_unix_ns,
            request_digest=live.digest,
        )
        if deadlines:
            entry.deadline_unix_ns = live.times.arrived_unix_ns + round(min(deadlines) * 1e9)
        durable = self._engine.journal.admit(entry)
        done, _ = await asyncio.wait([durable], timeout=ADMISSION_TIMEOUT_S)
        if not done:
            durable.add_done_callback(lambda _: self._withdraw(live, durable))
            raise UnavailableError("the journal's store does not answer; nothing was accepted", 1.0)
        durable.result()
        self._start(live, min(deadlines) if deadlines else None)

    def _withdraw(self, live: LiveRequest, durable: "asyncio.Future[None]") -> None:
        """Ends a request that became durable only after its client had been told to come back."""
        if not durable.cancelled() and durable.exception() is None:
            self._start(live, None)
            self._engine.end(live, pb.REQUEST_STATE_CANCELLED)

    def _start(self, live: LiveRequest, timeout_s: float | None) -> None:
        if timeout_s is not None:
            passed_s = (time.monotonic_ns() - live.times.arrived_ns) / 1e9
            live.deadline = asyncio.get_running_loop().call_later(
                timeout_s - passed_s, self._engine.end, live, pb.REQUEST_STATE_EXPIRED
            )
        self.readers.watch(live)
        self._engine.start(live)
        log.info(
            "request accepted",
            request_id=live.request_id,
            prompt_tokens=live.sequence.num_prompt_tokens,
            max_tokens=live.sequence.max_tokens,
        )

    async def _live(self, request_id: str) -> LiveRequest | None:
        """The request if it is live, once it is admitted if it is on its way."""
        task = self._admitting.get(request_id)
        if task is not None:
            await asyncio.wait([task])
        return self._engine.live.get(request_id)

    async def _record(self, request_id: str) -> journal_pb2.RequestRecord | None:
        payload = await self._engine.records.get(request_id)
        return None if payload is None else journal_pb2.RequestRecord.FromString(payload)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _other_body(request_id: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"request_id {request_id!r} belongs to a request with another body; choose a new id, or send the same body"
    )
