"""Inference service for clients. Handlers translate messages and raise; admission, control and engine do the work."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial

from common.rpc import Context
from common.violations import refusal_of
from quire.errors import (
    FailedPreconditionError,
    QuireError,
    RequestCancelledError,
    RequestExpiredError,
    RequestFailedError,
)
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from scheduler_svc.api.session import MAX_RESPONSE_TOKENS, ServerSession, add_chunk
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.live.output_stream import OutputStream
from scheduler_svc.requests.live.readers import Readers
from scheduler_svc.requests.params.prompt_checks import check_detokenize, check_tokenize
from scheduler_svc.requests.prefixes.prefix_requests import Prefixes
from scheduler_svc.requests.request_control import RequestControl
from scheduler_svc.requests.request_list import RequestList
from scheduler_svc.text.tokenizer import ModelTokenizer

ERROR_OF_STATE: dict[int, type[QuireError]] = {
    pb.REQUEST_STATE_CANCELLED: RequestCancelledError,
    pb.REQUEST_STATE_EXPIRED: RequestExpiredError,
    pb.REQUEST_STATE_FAILED: RequestFailedError,
}

_KEEPS_ON_HOST: dict[int, bool] = {
    pb.PAUSE_KEEP_UNSPECIFIED: True,
    pb.PAUSE_KEEP_AUTO: True,
    pb.PAUSE_KEEP_TOKENS: False,
}


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """One per process."""

    def __init__(
        self,
        admission: Admission,
        control: RequestControl,
        prefixes: Prefixes,
        requests: RequestList,
        stats: Callable[[], pb.GetStatsResponse],
        parsers: Mapping[str, str],
    ) -> None:
        """`parsers`: what GetModel tells of them instead of what was found, by field."""
        self._admission = admission
        self._control = control
        self._prefixes = prefixes
        self._requests = requests
        self._stats = stats
        self._parsers = parsers

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Streams one request."""
        stream, accepted = await self._admission.submit(request, context.time_remaining())
        async with aclosing(_read(self._admission.readers, stream, accepted, ())) as messages:
            async for message in messages:
                yield message

    async def Attach(self, request: pb.AttachRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Streams the rest of a request."""
        stream, accepted = await self._control.attach(request.request_id, request.from_positions)
        async with aclosing(_read(self._admission.readers, stream, accepted, request.from_positions)) as messages:
            async for message in messages:
                yield message

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        """Carries all requests of one client process."""
        session = ServerSession(self._admission, self._control)
        reading = asyncio.create_task(session.read(request_iterator))
        reading.add_done_callback(_retrieve)
        try:
            while True:
                response = await session.next_response()
                if response is None:
                    break
                yield response
            await reading  # raises what ended it
        finally:
            reading.cancel()
            session.close()

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        """Pause a request: take it off its worker."""
        if request.keep not in _KEEPS_ON_HOST:
            raise refusal_of("keep", f"is {request.keep}: give AUTO (1) or TOKENS (2)")
        keep_on_host = _KEEPS_ON_HOST[request.keep]
        return pb.PauseResponse(state=await self._control.pause(request.request_id, keep_on_host=keep_on_host))

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """Resume a paused request."""
        return pb.ResumeResponse(state=await self._control.resume(request.request_id))

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """Ends a request."""
        return pb.CancelResponse(state=await self._control.cancel(request.request_id))

    async def GetRequest(self, request: pb.GetRequestRequest, context: Context) -> pb.GetRequestResponse:
        """Describe a request."""
        response = await self._control.response(request.request_id, request.shards_version)
        response.waiting_for = self._requests.waiting_for(request.request_id)
        return response

    async def DeleteRecord(self, request: pb.DeleteRecordRequest, context: Context) -> pb.DeleteRecordResponse:
        """Delete the record of an ended request."""
        await self._control.delete_record(request.request_id)
        return pb.DeleteRecordResponse()

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:
        """Lists requests that have not ended."""
        return await self._requests.page(request)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Text or chat to token ids."""
        tokenizer = self._tokenizer()
        check_tokenize(request, self._admission.require_model().limits)
        return await self._admission.tokenizer.tokenized(request, tokenizer)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Token ids to text."""
        tokenizer = self._tokenizer()
        check_detokenize(request, self._admission.require_model().limits)
        return await self._admission.tokenizer.detokenized(request, tokenizer)

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Context) -> pb.PinPrefixResponse:
        """Computes a prefix and keeps it."""
        return await self._prefixes.pin(request)

    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Context) -> pb.UnpinPrefixResponse:
        """Unpin a prefix."""
        await self._prefixes.unpin(request)
        return pb.UnpinPrefixResponse()

    async def ListPrefixes(self, request: pb.ListPrefixesRequest, context: Context) -> pb.ListPrefixesResponse:
        """Lists a tenant's prefixes."""
        return self._prefixes.of_tenant(request.tenant)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Describes the model."""
        told = self._admission.require_model().to_pb()
        for name, parser in self._parsers.items():
            setattr(told, name, parser)
        return told

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        """Return counters of the scheduler and its workers."""
        return self._stats()

    def _tokenizer(self) -> ModelTokenizer:
        tokenizer = self._admission.require_model().tokenizer
        if tokenizer is None:
            raise FailedPreconditionError("the model has no tokenizer: it takes and gives token ids only")
        return tokenizer


async def _read(
    readers: Readers, stream: OutputStream, accepted: pb.Accepted, from_positions: Sequence[int]
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """Messages of one reader, to the end of the request. Raises the error of an end other than its own."""
    news = asyncio.Event()
    subscription = readers.subscribe(stream, from_positions, lambda _: news.set())
    try:
        yield pb.GenerateResponse(accepted=accepted)
        while not subscription.done:
            if not subscription.has_news:
                await news.wait()
                news.clear()
                continue
            chunks = pb.SessionResponse()
            subscription.take_chunks(partial(add_chunk, chunks, 0), MAX_RESPONSE_TOKENS)
            for event in chunks.events:
                yield pb.GenerateResponse(chunk=event.chunk)
        assert stream.finished is not None
        yield pb.GenerateResponse(finished=stream.finished)
        _raise_unless_finished(stream.finished)
    finally:
        subscription.close()


def _retrieve(task: "asyncio.Task[None]") -> None:
    if not task.cancelled():
        task.exception()  # retrieved: the client has gone


def _raise_unless_finished(finished: pb.Finished) -> None:
    kind = ERROR_OF_STATE.get(finished.state)
    if kind is not None:
        raise kind(finished.error or f"the request is {pb.RequestState.Name(finished.state).rsplit('_', 1)[1].lower()}")
