"""The Inference service: what clients call. Handlers translate and raise; the engine and the door do the work."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc

from common.errors import (
    FailedPreconditionError,
    FieldViolation,
    InvalidRequestError,
    QuireError,
    RequestCancelledError,
    RequestExpiredError,
    RequestFailedError,
)
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from scheduler_svc.api.session import MAX_RESPONSE_TOKENS, Session, add_chunk
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.prefixes import Prefixes
from scheduler_svc.requests.served_model import encode_chat
from scheduler_svc.text.tokenizer import ModelTokenizer

ERROR_OF_STATE: dict[int, type[QuireError]] = {
    pb.REQUEST_STATE_CANCELLED: RequestCancelledError,
    pb.REQUEST_STATE_EXPIRED: RequestExpiredError,
    pb.REQUEST_STATE_FAILED: RequestFailedError,
}


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """One per process."""

    def __init__(self, admission: Admission, prefixes: Prefixes, stats: Callable[[], pb.GetStatsResponse]) -> None:
        self._admission = admission
        self._prefixes = prefixes
        self._stats = stats

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams one request."""
        stream, accepted = await self._admission.submit(request, context.time_remaining())
        news = asyncio.Event()
        subscription = self._admission.readers.subscribe(stream, (), lambda _: news.set())
        try:
            yield pb.GenerateResponse(accepted=accepted)
            while not subscription.done:
                if not subscription.has_news:
                    await news.wait()
                    news.clear()
                    continue
                chunks = pb.SessionResponse()
                subscription.take(partial(add_chunk, chunks, 0), MAX_RESPONSE_TOKENS)
                for event in chunks.events:
                    yield pb.GenerateResponse(chunk=event.chunk)
            assert stream.finished is not None
            yield pb.GenerateResponse(finished=stream.finished)
            _raise_unless_finished(stream.finished)
        finally:
            subscription.close()

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse],
    ) -> AsyncIterator[pb.SessionResponse]:
        """Carries all requests of one client process."""
        session = Session(self._admission)
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

    async def Cancel(
        self, request: pb.CancelRequest, context: grpc.aio.ServicerContext[pb.CancelRequest, pb.CancelResponse]
    ) -> pb.CancelResponse:
        """Ends a request."""
        return pb.CancelResponse(state=await self._admission.cancel(request.request_id))

    async def GetRequest(
        self,
        request: pb.GetRequestRequest,
        context: grpc.aio.ServicerContext[pb.GetRequestRequest, pb.GetRequestResponse],
    ) -> pb.GetRequestResponse:
        """Tells what is known of a request."""
        return await self._admission.response(request.request_id)

    async def Tokenize(
        self,
        request: pb.TokenizeRequest,
        context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse],
    ) -> pb.TokenizeResponse:
        """Text or chat to token ids."""
        tokenizer = self._tokenizer()
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequestError.of([FieldViolation("input", "give `text` or `chat`")])
        if kind == "chat":
            ids = await asyncio.to_thread(encode_chat, tokenizer, request.chat)
        else:
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await asyncio.to_thread(tokenizer.encode, request.text, special)
        return pb.TokenizeResponse(token_ids=ids, tokens=tokenizer.tokens(ids))

    async def Detokenize(
        self,
        request: pb.DetokenizeRequest,
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        """Token ids to text."""
        tokenizer = self._tokenizer()
        vocab_size = self._admission.require_model().limits.vocab_size
        bad = next((i for i, each in enumerate(request.token_ids) if not 0 <= each < vocab_size), None)
        if bad is not None:
            description = f"is {request.token_ids[bad]}, not in [0, {vocab_size})"
            raise InvalidRequestError.of([FieldViolation(f"token_ids[{bad}]", description)])
        ids = list(request.token_ids)
        return pb.DetokenizeResponse(text=await asyncio.to_thread(tokenizer.decode, ids, request.keep_special_tokens))

    async def PinPrefix(
        self,
        request: pb.PinPrefixRequest,
        context: grpc.aio.ServicerContext[pb.PinPrefixRequest, pb.PinPrefixResponse],
    ) -> pb.PinPrefixResponse:
        """Computes a prefix and keeps it."""
        return await self._prefixes.pin(request)

    async def UnpinPrefix(
        self,
        request: pb.UnpinPrefixRequest,
        context: grpc.aio.ServicerContext[pb.UnpinPrefixRequest, pb.UnpinPrefixResponse],
    ) -> pb.UnpinPrefixResponse:
        """Lets a prefix go."""
        await self._prefixes.unpin(request)
        return pb.UnpinPrefixResponse()

    async def ListPrefixes(
        self,
        request: pb.ListPrefixesRequest,
        context: grpc.aio.ServicerContext[pb.ListPrefixesRequest, pb.ListPrefixesResponse],
    ) -> pb.ListPrefixesResponse:
        """Lists a tenant's prefixes."""
        return self._prefixes.of_tenant(request.tenant)

    async def GetModel(
        self,
        request: pb.GetModelRequest,
        context: grpc.aio.ServicerContext[pb.GetModelRequest, pb.GetModelResponse],
    ) -> pb.GetModelResponse:
        """Describes the model."""
        return self._admission.require_model().to_pb()

    async def GetStats(
        self,
        request: pb.GetStatsRequest,
        context: grpc.aio.ServicerContext[pb.GetStatsRequest, pb.GetStatsResponse],
    ) -> pb.GetStatsResponse:
        """Counts."""
        return self._stats()

    def _tokenizer(self) -> ModelTokenizer:
        tokenizer = self._admission.require_model().tokenizer
        if tokenizer is None:
            raise FailedPreconditionError("the model has no tokenizer: it takes and gives token ids only")
        return tokenizer


def _retrieve(task: "asyncio.Task[None]") -> None:
    if not task.cancelled():
        task.exception()  # of a client that has gone it concerns nobody


def _raise_unless_finished(finished: pb.Finished) -> None:
    kind = ERROR_OF_STATE.get(finished.state)
    if kind is not None:
        raise kind(finished.error or f"the request is {pb.RequestState.Name(finished.state).rsplit('_', 1)[1].lower()}")
