"""Streams that are listened to: what has arrived is told and taken, without a task that waits."""

import asyncio
from typing import Any

import pytest

import quire
from quire.open_request import OpenRequest
from quire.results import RequestState
from quire.stream import CompletionStream
from tests.gateway.scripted_client import ScriptedSession, chunks_of, outcome

CHUNKS = chunks_of(["a", "b", "c"])


def opened(*, buffer_tokens: int = 10) -> tuple[OpenRequest, CompletionStream, ScriptedSession]:
    request, session = OpenRequest("r", from_positions=(), buffer_tokens=buffer_tokens), ScriptedSession()
    return request, CompletionStream(session, request, cancels_on_close=True), session


async def test_each_chunk_and_the_end_are_told_also_those_from_before() -> None:
    request, stream, _ = opened()
    request.push_chunk(CHUNKS[0])
    told: list[str | None] = []

    def take() -> None:
        chunk = stream.take()
        told.append(None if chunk is None else chunk.text)

    stream.listen(take)
    assert told == ["a"]
    request.push_chunk(CHUNKS[1])
    request.push_chunk(CHUNKS[2])
    assert told == ["a", "b", "c"] and not stream.is_at_end
    request.record_outcome(outcome(CHUNKS))
    assert told == ["a", "b", "c", None] and stream.is_at_end


async def test_the_end_from_before_is_told() -> None:
    request, stream, _ = opened()
    request.push_chunk(CHUNKS[0])
    request.record_outcome(outcome(CHUNKS))
    told: list[bool] = []
    stream.listen(lambda: told.append(stream.take() is None))
    assert told == [False, True]


async def test_output_that_did_not_fit_is_fetched_once_the_rest_is_taken() -> None:
    request, stream, session = opened(buffer_tokens=1)
    for chunk in CHUNKS:
        request.push_chunk(chunk)
    assert request.is_behind and session.asked == []
    assert stream.take() is CHUNKS[0]
    assert session.asked == ["catch up"] and not stream.is_at_end


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (RequestState.CANCELLED, quire.RequestCancelledError),
        (RequestState.EXPIRED, quire.RequestExpiredError),
        (RequestState.FAILED, quire.RequestFailedError),
    ],
)
async def test_taking_raises_as_iteration_and_behind_the_output(
    state: RequestState, error: type[quire.QuireError]
) -> None:
    request, stream, _ = opened()
    request.push_chunk(CHUNKS[0])
    request.record_outcome(outcome(CHUNKS[:1], state))
    assert stream.take() is CHUNKS[0]
    with pytest.raises(error, match="after 1 tokens"):
        stream.take()


@pytest.mark.parametrize("detaches", [False, True])
async def test_a_closed_stream_tells_nothing(detaches: bool) -> None:
    request, stream, session = opened()
    told: list[bool] = []
    stream.listen(lambda: told.append(True))
    if detaches:
        stream.detach()
    else:
        await stream.aclose()
    assert (told, session.asked, request.has_ended) == ([], ["detach" if detaches else "cancel"], True)


async def test_a_listener_that_fails_is_reported_and_the_session_goes_on() -> None:
    request, stream, _ = opened()
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))

    def fail() -> None:
        raise quire.UnavailableError("a fault of the listener")

    stream.listen(fail)
    request.push_chunk(CHUNKS[0])
    assert [str(each["exception"]) for each in reported] == ["a fault of the listener"]
    assert stream.take() is CHUNKS[0]
