"""A worker in small that behaves as a test says: a real gRPC server, a fake model, and a script of misbehaviour.

The model is `scripted_model`: after token t comes t + 1, or what the sample index and the candidates of beams make of
it. The worker checks what a real one checks first, the order of steps, and knows of a seat only what steps said.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from common.arrays import pack_float32, pack_int32, unpack_int32
from common.rpc import CLUSTER_MESSAGE_BYTES, EdgeInterceptor, server_options
from common.step_wire import open_request, seal_response
from quire.v1 import cluster_pb2
from quire.v1 import worker_pb2 as pb
from tests.scheduler import scripted_model as model
from tests.scheduler.scripted_model import EOS, VOCAB_SIZE

__all__ = ["EOS", "EPOCH_OF_NOBODY", "VOCAB_SIZE", "Answer", "ScriptedWorker"]

EPOCH_OF_NOBODY = 0

Answer = pb.StepResponse | bytes | None  # bytes go out as they are; None is silence
Script = Callable[[pb.StepRequest], Answer]


@dataclass(slots=True)
class Seat:
    """`token_ids` are known and not yet computed, the first of them at `position`."""

    token_ids: list[int]
    position: int
    num_prompt_tokens: int
    sampling: pb.SequenceSampling

    def held_back(self) -> list[int]:
        """Tokens that may not come next."""
        is_too_early = self.position < self.sampling.suppressed_until
        return list(unpack_int32(self.sampling.suppressed_ids)) if is_too_early else []


class ScriptedWorker:
    """Answers `Describe` and `StepStream`: by `execute`, or as `script` says, which may call that."""

    def __init__(self, worker_id: str = "w1", *, num_blocks: int = 64, num_seats: int = 64) -> None:
        self.description = pb.DescribeResponse(
            worker_id=worker_id,
            incarnation=f"{worker_id}-1",
            model=pb.ModelInfo(
                name="counting",
                fingerprint="counting-1",
                architecture="Counting",
                dtype="float32",
                vocab_size=VOCAB_SIZE,
                max_model_len=65_536,
                eos_token_ids=[EOS],
            ),
            pool=pb.PoolInfo(num_blocks=num_blocks, block_size=16, bytes_per_block=1024),
            num_seats=num_seats,
            max_batched_tokens=4096,
            device="none",
        )
        self.script: Script = self.execute
        self.wire: Callable[[bytes], bytes] = lambda data: data  # what becomes of messages on their way, both ways
        self.tells_prompt_logprobs = False
        self.steps: list[pb.StepRequest] = []  # as they arrived
        self.num_streams = 0
        self.address = ""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.may_describe = asyncio.Event()
        self.may_describe.set()
        self._seats: dict[int, Seat] = {}
        self._next_step_id: int | None = None
        self._epoch = EPOCH_OF_NOBODY
        self._server: grpc.aio.Server | None = None

    def registration(self, **changes: Any) -> cluster_pb2.RegisterRequest:
        """Build its periodic registration."""
        said = {
            "worker_id": self.description.worker_id,
            "address": self.address,
            "incarnation": self.description.incarnation,
            "model_fingerprint": self.description.model.fingerprint,
        }
        return cluster_pb2.RegisterRequest(**{**said, **changes})

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server(interceptors=[EdgeInterceptor()], options=server_options(CLUSTER_MESSAGE_BYTES))
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self._describe, pb.DescribeRequest.FromString, pb.DescribeResponse.SerializeToString
            ),
            "StepStream": grpc.stream_stream_rpc_method_handler(
                self._step_stream,
                lambda data: open_request(self.wire(data)),
                lambda answer: self.wire(_raw_or_sealed(answer)),
            ),
        }
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("quire.v1.Worker", handlers)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port(address)}"
        await self._server.start()

    async def stop(self) -> None:
        """Gone, as if it had been killed."""
        self.may_answer.set()
        self.may_describe.set()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def _describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        await self.may_describe.wait()
        return self.description

    async def _step_stream(self, requests: AsyncIterator[pb.StepRequest], context: Any) -> AsyncIterator[Answer]:
        self.num_streams += 1
        async for request in requests:
            self.steps.append(request)
            answer = self.script(request)
            await self.may_answer.wait()
            if answer is not None:
                yield answer

    def refuse(self, status: pb.StepStatus.ValueType, *, times: int, after: int = 0, error: str = "scripted") -> None:
        """Refuse steps: after the first `after` ones, the next `times` that could be executed."""
        left = times

        def script(request: pb.StepRequest) -> Answer:
            nonlocal left
            if not left or len(self.steps) <= after or not self._is_due(request):
                return self.execute(request)
            left -= 1
            if status == pb.STEP_STATUS_FAILED:
                self._next_step_id = None
            return pb.StepResponse(epoch=request.epoch, step_id=request.step_id, status=status, error=error)

        self.script = script

    def make_invalid(self, *bad_tokens: int) -> None:
        """The logits of whatever would draw one of these tokens are not finite."""

        def script(request: pb.StepRequest) -> Answer:
            response = self.execute(request)
            tokens = unpack_int32(response.token_ids)
            response.invalid_samples = pack_int32(i for i, token in enumerate(tokens) if token in bad_tokens)
            return response

        self.script = script

    def silence_after(self, num_steps: int) -> None:
        """Answer this many steps; answer later ones after `speak_again`."""
        self.silence_once(lambda: len(self.steps) > num_steps)

    def silence_once(self, condition: Callable[[], bool]) -> None:
        """Answer steps until one arrives while the condition holds; answer this and later ones after `may_answer`."""

        def script(request: pb.StepRequest) -> Answer:
            if condition():
                self.may_answer.clear()
                self.script = self.execute
            return self.execute(request)

        self.script = script

    def speak_again(self) -> None:
        """Ends what `silence_after` began, or is yet to begin; the script is over."""
        self.script = self.execute
        self.may_answer.set()

    def execute(self, request: pb.StepRequest) -> pb.StepResponse:
        """The right answer."""
        response = pb.StepResponse(epoch=request.epoch, step_id=request.step_id, status=pb.STEP_STATUS_OK, exec_ns=1)
        if request.epoch < self._epoch:
            response.status, response.epoch = pb.STEP_STATUS_STALE_EPOCH, self._epoch
            return response
        self._epoch = request.epoch
        if not self._is_due(request):
            response.status = pb.STEP_STATUS_NEED_SNAPSHOT
            return response
        self._next_step_id = request.step_id + 1
        self._update_seats(request)
        last = self._compute(request, response)
        self._sample(request, last, response)
        pairs = unpack_int32(request.candidates)
        rows = unpack_int32(request.rows)
        for row, num_wanted in zip(pairs[::2], pairs[1::2], strict=True):
            response.candidates.append(_candidates(self._seats[rows[row]], last[row], num_wanted))
        return response

    def _is_due(self, request: pb.StepRequest) -> bool:
        return request.snapshot or request.step_id == self._next_step_id

    def _update_seats(self, request: pb.StepRequest) -> None:
        if request.snapshot:
            self._seats.clear()
        for seat in unpack_int32(request.freed_seats):
            del self._seats[seat]
        for state in request.whole:
            token_ids = list(unpack_int32(state.token_ids))
            self._seats[state.seat] = Seat(token_ids, state.position, state.num_prompt_tokens, state.sampling)

    def _compute(self, request: pb.StepRequest, response: pb.StepResponse) -> list[int]:
        """The last token that each row computed."""
        rows = unpack_int32(request.rows)
        num_tokens = unpack_int32(request.num_tokens) or [1] * len(rows)
        last: list[int] = []
        for number, count in zip(rows, num_tokens, strict=True):
            seat = self._seats[number]
            assert 1 <= count <= len(seat.token_ids), "more tokens are to be computed than this seat knows"
            if self.tells_prompt_logprobs and seat.sampling.HasField("num_prompt_logprobs"):
                _add_prompt_logprobs(response, number, seat, count)
            last.append(seat.token_ids[count - 1])
            del seat.token_ids[:count]
            seat.position += count
        return last

    def _sample(self, request: pb.StepRequest, last: list[int], response: pb.StepResponse) -> None:
        pairs = unpack_int32(request.samples) if request.HasField("samples") else None
        samples = list(enumerate(unpack_int32(request.rows)))
        if pairs is not None:
            samples = list(zip(pairs[::2], pairs[1::2], strict=True))
        token_ids = []
        for sample, (row, number) in enumerate(samples):
            seat = self._seats[number]
            token_ids.append(model.next_token(last[row], seat.sampling.sample_index))
            seat.token_ids.append(token_ids[-1])
            if seat.sampling.HasField("num_logprobs"):
                rows = _logprob_rows(last[row], token_ids[-1:], seat.sampling.num_logprobs)
                response.logprobs.add(sample=sample, rows=rows)
        response.token_ids = pack_int32(token_ids)


def _add_prompt_logprobs(response: pb.StepResponse, number: int, seat: Seat, count: int) -> None:
    num_rows = min(seat.position + count, seat.num_prompt_tokens - 1) - seat.position
    if num_rows < 1:
        return
    pairs = zip(seat.token_ids[:num_rows], seat.token_ids[1 : num_rows + 1], strict=True)
    rows = pb.LogprobRows()
    for last, token_id in pairs:
        row = _logprob_rows(last, [token_id], seat.sampling.num_prompt_logprobs)
        rows.logprobs += row.logprobs
        rows.ranks += row.ranks
        rows.num_top = row.num_top
        rows.top_token_ids += row.top_token_ids
        rows.top_logprobs += row.top_logprobs
    response.prompt_logprobs.add(seat=number, position=seat.position + 1, rows=rows)


def _logprob_rows(last: int, token_ids: Sequence[int], num_top: int) -> pb.LogprobRows:
    top = model.candidates(last, num_top, allowed=(), held_back=()) * len(token_ids)
    return pb.LogprobRows(
        logprobs=pack_float32(model.logprob(last, each) for each in token_ids),
        ranks=pack_int32(model.rank(last, each) for each in token_ids),
        num_top=num_top,
        top_token_ids=pack_int32(top),
        top_logprobs=pack_float32(model.logprob(last, each) for each in top),
    )


def _candidates(seat: Seat, last: int, num_wanted: int) -> pb.Candidates:
    allowed, held_back = unpack_int32(seat.sampling.allowed_ids), seat.held_back()
    token_ids = model.candidates(last, num_wanted, allowed=allowed, held_back=held_back)
    logprobs = model.candidate_logprobs(last, token_ids, allowed=allowed, held_back=held_back)
    found = pb.Candidates(token_ids=pack_int32(token_ids), logprobs=pack_float32(logprobs))
    if seat.sampling.HasField("num_logprobs"):
        found.rows.CopyFrom(_logprob_rows(last, token_ids, seat.sampling.num_logprobs))
    return found


def _raw_or_sealed(answer: Answer) -> bytes:
    assert answer is not None
    return answer if isinstance(answer, bytes) else seal_response(answer)
