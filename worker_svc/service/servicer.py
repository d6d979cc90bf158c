"""The gRPC service `Worker`, between the wire and the executor.

Decides which of several streams is the current one. While the model is being loaded
it answers every call with UNAVAILABLE.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from common.generated_handlers import GeneratedHandlers
from common.step_codec import result_to_pb
from common.step_wire import open_any_request, open_request, seal_response
from quire.errors import FailedPreconditionError, UnavailableError
from quire.v1 import inference_pb2, worker_pb2_grpc
from quire.v1 import worker_pb2 as pb
from worker_svc.checkpoint.tokenizer_files import TokenizerFiles
from worker_svc.description import WorkerDescription
from worker_svc.service.block_reads import BlockReads
from worker_svc.service.caller_check import Context, check_read_key, check_step_key
from worker_svc.service.fetch_calls import FetchCalls
from worker_svc.service.scheduler_stream import SchedulerStream, StreamEnd, StreamReplacedError, decode
from worker_svc.steps.executor import StepExecutor
from worker_svc.steps.fetched_blocks import FetchedBlocks

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Worker"].full_name
_ROLES = {
    "mixed": pb.WORKER_ROLE_UNSPECIFIED,
    "prefill": pb.WORKER_ROLE_PREFILL,
    "decode": pb.WORKER_ROLE_DECODE,
}
_LOADING_RETRY_S = 0.5
_DRAINING_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedBlocks:
    """Ways of blocks between this worker and others."""

    reads: BlockReads
    fetches: FetchCalls
    format: str
    fetched: FetchedBlocks


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """Description and executor of a loaded worker, and the ways of its blocks; None: they stay where they are."""

    description: WorkerDescription
    executor: StepExecutor
    travel: ServedBlocks | None = None


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """One worker; `serve` is called when it is loaded."""

    def __init__(self, worker_id: str, incarnation: str, step_key: str = "") -> None:
        """Accepts steps only from calls that carry `step_key`; from every caller if it is empty."""
        self._worker_id = worker_id
        self._step_key = step_key
        self.incarnation = incarnation
        self.on_stream_begin: Callable[[], None] = lambda: None
        self.on_current_stream_end: Callable[[], None] = lambda: None
        self._worker: LoadedWorker | None = None
        self._draining = False
        self._streams: set[SchedulerStream] = set()  # open ones
        self._current: SchedulerStream | None = None  # the one whose steps count

    @property
    def has_stream(self) -> bool:
        """True while a leader has a stream of steps open."""
        return bool(self._streams)

    def serve(self, worker: LoadedWorker) -> None:
        """Answers calls from now on."""
        self._worker = worker

    def begin_life(self, incarnation: str, step_key: str) -> None:
        """Become a new incarnation: the streams of the former one end, and only callers with the new key are served."""
        self.incarnation, self._step_key = incarnation, step_key
        for stream in self._streams:
            stream.end(StreamEnd(StreamReplacedError("the worker serves another shard now"), at_once=True))
        self._forget_fetches()

    async def drain(self) -> None:
        """Accepts no more steps, answers those accepted so far, and ends all streams."""
        self._draining = True
        for stream in self._streams:
            stream.end(StreamEnd(_draining()))
        self._forget_fetches()
        if self._worker is not None:
            await self._worker.executor.drain()

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        worker = self._loaded()
        description, travel = worker.description, worker.travel
        return pb.DescribeResponse(
            worker_id=self._worker_id,
            incarnation=self.incarnation,
            model=_model(description),
            tokenizer=_tokenizer(description.tokenizer, request.known_tokenizer_fingerprint),
            pool=pb.PoolInfo(
                num_blocks=description.limits.num_blocks,
                block_size=description.limits.block_size,
                num_host_blocks=description.limits.num_host_blocks,
                bytes_per_block=description.bytes_per_block,
                dtype=description.kv_dtype,
                block_format="" if travel is None else travel.format,
                max_fetched_blocks=0 if travel is None else travel.fetched.max_blocks,
            ),
            num_seats=description.limits.num_seats,
            max_batched_tokens=description.limits.max_batched_tokens,
            device=description.device,
            role=_ROLES[description.role],
            startup=[pb.PhaseTime(phase=each.phase, duration_ms=each.duration_ms) for each in description.startup],
        )

    async def StepStream(
        self, request_iterator: AsyncIterator[pb.StepRequest], context: Context
    ) -> AsyncIterator[pb.StepResponse]:
        check_step_key(context, self._step_key)
        stream = SchedulerStream(self._accepting().executor, self._claim)
        self._streams.add(stream)
        self.on_stream_begin()
        try:
            async for response in stream.answers(request_iterator):
                yield response
        finally:
            self._streams.remove(stream)
            if self._current is stream:
                self._current = None
                self.on_current_stream_end()

    async def Step(self, request: pb.StepRequest, context: Context) -> pb.StepResponse:
        check_step_key(context, self._step_key)
        return result_to_pb(await self._accepting().executor.answer(decode(request)))

    async def FetchBlocks(
        self, request: pb.FetchBlocksRequest, context: Context
    ) -> AsyncIterator[pb.FetchBlocksResponse]:
        check_step_key(context, self._step_key)
        async with aclosing(self._travel().fetches.fetch(request)) as progress:
            async for each in progress:
                yield each

    async def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Context) -> AsyncIterator[Any]:
        """Frames as bytes: see `add_to_server`."""
        check_read_key(request, self._step_key)
        async with aclosing(self._travel().reads.frames(request)) as frames:
            self._check_incarnation(request)
            async for frame in frames:
                self._check_incarnation(request)
                yield frame

    def _check_incarnation(self, request: pb.ReadBlocksRequest) -> None:
        """Raises FailedPreconditionError."""
        if request.incarnation != self.incarnation:
            raise FailedPreconditionError(f"this worker is another incarnation, {self.incarnation}")

    def _travel(self) -> ServedBlocks:
        travel = self._accepting().travel
        if travel is None:
            raise FailedPreconditionError("this worker neither fetches blocks nor lets others read them")
        return travel

    def _forget_fetches(self) -> None:
        if self._worker is not None and self._worker.travel is not None:
            self._worker.travel.fetched.forget_all()

    def _claim(self, stream: SchedulerStream, epoch: int) -> None:
        """Makes a stream the current one at its first step, unless the current one has a higher epoch."""
        current = self._current
        if stream is current or (current is not None and epoch < current.epoch):
            return
        self._current = stream
        if current is not None:
            current.end(StreamEnd(StreamReplacedError("another stream has replaced this one"), at_once=True))

    def _loaded(self) -> LoadedWorker:
        if self._worker is None:
            raise UnavailableError("the model is being loaded: retry soon", _LOADING_RETRY_S)
        return self._worker

    def _accepting(self) -> LoadedWorker:
        if self._draining:
            raise _draining()
        return self._loaded()


def add_to_server(servicer: WorkerServicer, server: grpc.aio.Server) -> None:
    """Add handlers before the generated ones: they check a step's checksum on the bytes, and send frames as bytes."""
    generated: Any = GeneratedHandlers()
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, generated)
    sealed: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "StepStream": grpc.stream_stream_rpc_method_handler(servicer.StepStream, open_request, seal_response),
        "ReadBlocks": grpc.unary_stream_rpc_method_handler(servicer.ReadBlocks, pb.ReadBlocksRequest.FromString, bytes),
        "Step": grpc.unary_unary_rpc_method_handler(servicer.Step, open_any_request, pb.StepResponse.SerializeToString),
    }
    ours = grpc.method_handlers_generic_handler(SERVICE_NAME, sealed)
    server.add_generic_rpc_handlers([ours, *generated.handlers])


def _draining() -> UnavailableError:
    return UnavailableError("the worker is shutting down", _DRAINING_RETRY_S)


def _model(description: WorkerDescription) -> pb.ModelInfo:
    model = description.model
    return pb.ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        architecture=model.architecture,
        dtype=model.dtype,
        vocab_size=description.limits.vocab_size,
        max_model_len=description.limits.max_model_len,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults=inference_pb2.SamplingParams(**model.sampling_defaults),  # type: ignore[arg-type]
    )


def _tokenizer(files: TokenizerFiles | None, known_fingerprint: str) -> pb.TokenizerFiles | None:
    if files is None:
        return None
    return pb.TokenizerFiles(
        fingerprint=files.fingerprint,
        tokenizer_json=b"" if files.fingerprint == known_fingerprint else files.tokenizer_json,
        chat_template=files.chat_template or "",
        special_tokens=files.special_tokens,
    )
