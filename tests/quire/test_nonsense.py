"""A server that answers nonsense, in messages that are whole: what a client raises is a QuireError, and soon."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

import quire
from quire.errors import MAX_RETRY_AFTER_S, DataLossError, OverloadedError, QuireError, from_status
from quire.v1 import inference_pb2 as pb
from tests.patience import patient
from tests.quire.scripted_run import Script
from tests.quire.scripted_server import ScriptedServer

UNKNOWN: Any = 99  # in no enum of ours
MANY = 2_000_000  # a list of so many takes no machine down
_UNAVAILABLE = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


def unreadable_detail(message: Any) -> bytes:
    """A status whose detail says that it is such a message, and is none."""
    detail = any_pb2.Any(type_url=f"type.googleapis.com/{message.DESCRIPTOR.full_name}", value=b"\xff\xff\xff")
    code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
    return bytes(status_pb2.Status(code=code, message="no", details=[detail]).SerializeToString())


def finished(**changes: Any) -> dict[str, Any]:
    return {"finished": pb.Finished(**changes)}


def chunk(**changes: Any) -> dict[str, Any]:
    return {"chunk": pb.Chunk(**changes)}


NONSENSE: dict[str, list[dict[str, Any]]] = {
    "an error whose status is none": [{"error": pb.Error(code=3, message="no", status=b"\xff\xff\xff")}],
    "an error whose violations are none": [
        {"error": pb.Error(code=3, status=unreadable_detail(error_details_pb2.BadRequest))}
    ],
    "an error of no code": [{"error": pb.Error(code=-7, message="no")}],
    "an end of no state": [finished(state=UNKNOWN)],
    "a sample's end of no reason": [chunk(num_tokens=1, finish=pb.SampleFinish(reason=UNKNOWN))],
    "a sample beyond all": [chunk(index=MANY, num_tokens=1), chunk(index=MANY, position=1, num_tokens=1)],
    "positions beyond all": [chunk(num_tokens=2**32 - 1), chunk(position=2**32 - 1, num_tokens=2**32 - 1)],
}


class NonsenseServer(ScriptedServer):
    """Server that answers each request of a session, except "right", with the same events, then breaks it off."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        super().__init__()
        self._events = events

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        self.num_sessions += 1
        handles = []
        async for request in request_iterator:
            if request.WhichOneof("action") in ("submit", "attach"):
                handles.append(request.handle)
                accepted = pb.Accepted(request_id=request.submit.request_id, num_samples=1, max_tokens=9)
                yield pb.SessionResponse(events=[pb.SessionEvent(handle=request.handle, accepted=accepted)])
                for event in self._events:
                    yield pb.SessionResponse(events=[pb.SessionEvent(handle=request.handle, **event)])
            if len(handles) > 1:
                return


@pytest.mark.parametrize("events", NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_on_a_session_ends_as_an_error_of_ours(events: list[dict[str, Any]]) -> None:
    complaints: list[str] = []  # of the event loop: exceptions that nobody took

    def note_complaint(_: object, context: dict[str, Any]) -> None:
        # gRPC has one poller for all loops of a process: here it may meet an event of a loop that another test closed.
        if "PollerCompletionQueue" not in str(context.get("handle")):
            complaints.append(str(context))

    asyncio.get_running_loop().set_exception_handler(note_complaint)
    server = NonsenseServer(events)
    await server.start()
    try:
        async with quire.AsyncClient(server.address, reconnect_timeout_s=2.0, retries=0) as client:
            async with asyncio.timeout(patient(30)):
                with pytest.raises(QuireError):
                    await client.generate("x")
    finally:
        await server.stop()
    assert not complaints


CALLS: dict[str, tuple[str, Any, Callable[[quire.AsyncClient], Any]]] = {
    "GetRequest": ("GetRequest", pb.GetRequestResponse(state=UNKNOWN), lambda client: client.get("r")),
    "a sample of GetRequest": (
        "GetRequest",
        pb.GetRequestResponse(
            state=pb.REQUEST_STATE_FINISHED, samples=[pb.SampleOutput(finish=pb.SampleFinish(reason=UNKNOWN))]
        ),
        lambda client: client.get("r"),
    ),
    "ListRequests": (
        "ListRequests",
        pb.ListRequestsResponse(requests=[pb.RequestSummary(state=UNKNOWN)]),
        lambda client: client.list_requests(),
    ),
    "Cancel": ("Cancel", pb.CancelResponse(), lambda client: client.cancel("r")),
    "Resume": ("Resume", pb.ResumeResponse(state=UNKNOWN), lambda client: client.resume("r")),
}


@pytest.mark.parametrize(("method", "answer", "call"), CALLS.values(), ids=CALLS)
async def test_a_state_that_the_client_does_not_know_is_an_error_of_ours(
    method: str, answer: Any, call: Callable[[quire.AsyncClient], Any]
) -> None:
    """Regression: this was a KeyError."""

    async def nonsense(self: ScriptedServer, request: Any, context: Any) -> Any:
        return answer

    server: ScriptedServer = type("UnknownServer", (ScriptedServer,), {method: nonsense})()
    await server.start()
    try:
        async with quire.AsyncClient(server.address) as client:
            with pytest.raises(QuireError, match="that this client does not know"):
                await call(client)
    finally:
        await server.stop()


def test_a_delay_of_years_is_not_waited_for() -> None:
    retry = error_details_pb2.RetryInfo()
    for seconds, wanted_s in ((10**11, MAX_RETRY_AFTER_S), (-5, 0.0)):
        retry.retry_delay.seconds = seconds
        status = status_pb2.Status(code=_UNAVAILABLE)
        status.details.add().Pack(retry)
        error = from_status(status)
        assert isinstance(error, OverloadedError) and error.retry_after_s == wanted_s


async def test_an_end_in_a_state_that_the_client_does_not_know_ends_that_request_alone(server: ScriptedServer) -> None:
    """Regression: it broke the stream of all, again and again."""
    server.scripts["strange"] = Script(num_tokens=2, state=UNKNOWN)
    server.scripts["long"] = Script(num_tokens=3, released=1)
    async with quire.AsyncClient(server.address) as client, asyncio.timeout(patient(30)):
        beside = client.stream("long", request_id="long")
        await beside.accepted()
        with pytest.raises(DataLossError):
            await client.generate("strange")
        server.release("long")
        assert (await beside.completion()).text == " 0 1 2"
    assert server.num_sessions == 1


class Miscounting(ScriptedServer):
    """Server that numbers its first message wrongly, on every stream."""

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        async for _ in request_iterator:
            yield pb.SessionResponse(number=7)


async def test_each_request_of_a_stream_that_is_given_up_gets_an_error_of_its_own() -> None:
    """Regression: all raised the same one, whose traceback grew with each of them."""
    server = Miscounting()
    await server.start()
    try:
        async with quire.AsyncClient(server.address) as client, asyncio.timeout(patient(30)):
            calls = (client.generate(prompt) for prompt in "abc")
            errors = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        await server.stop()
    assert [(type(each), str(each)) for each in errors] == [(DataLossError, "message 1 was due and 7 came")] * 3
    assert len(set(map(id, errors))) == 3
