"""A server that ends the stream of all requests for one that it cannot read: the others go on."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

import quire
from quire.errors import InvalidRequestError, QuireError, UnauthenticatedError, UnavailableError
from quire.v1 import inference_pb2 as pb
from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer


class EndingServer(ScriptedServer):
    """Server that ends each session with this error once the submission of "poison" comes."""

    def __init__(self, error: QuireError) -> None:
        super().__init__()
        self.scripts["long"] = Script(released=2)
        self._error = error

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.SessionResponse]:
        is_poisoned = False

        async def read() -> AsyncIterator[pb.SessionRequest]:
            nonlocal is_poisoned
            async for request in request_iterator:
                if request.submit.text == "poison":
                    is_poisoned = True
                    self.break_sessions()
                    return
                yield request

        try:
            async for response in super().Session(read(), context):
                yield response
        except UnavailableError:
            raise (self._error if is_poisoned else UnavailableError("broken")) from None


async def outcomes(error: QuireError) -> tuple[str, QuireError]:
    """The text of a request that has begun to answer, or its error, and the error of the other."""
    server = EndingServer(error)
    await server.start()
    try:
        async with quire.AsyncClient(server.address) as client, asyncio.timeout(patient(30)):
            stream = client.stream("long", request_id="long")
            first = await anext(aiter(stream))
            with pytest.raises(QuireError) as caught:
                await client.generate("poison")
            server.release("long")
            try:
                rest = "".join([chunk.text async for chunk in stream])
            except QuireError as lost:
                return type(lost).__name__, caught.value
            return first.text + rest, caught.value
    finally:
        await server.stop()


async def test_requests_that_were_taken_outlive_one_that_cannot_be_read() -> None:
    text, refusal = await outcomes(InvalidRequestError("too many fields"))
    assert text == " 0 1 2 3 4 5 6 7"
    assert isinstance(refusal, InvalidRequestError)


async def test_a_client_that_is_refused_as_a_whole_loses_all() -> None:
    lost, refusal = await outcomes(UnauthenticatedError("no key"))
    assert lost == "UnauthenticatedError"
    assert isinstance(refusal, UnauthenticatedError)
