"""Streams of events on a connection: in the turn of their output, to slow readers, and to readers that leave."""

import asyncio
from collections.abc import Callable

import pytest

from gateway_svc.event_stream import EventStream, Steps
from gateway_svc.generation import Generation
from quire.open_request import OpenRequest
from quire.results import Chunk
from quire.stream import CompletionStream
from tests.gateway.scripted_client import ScriptedSession, outcome
from tests.gateway.wire import WiredCall, frames, texts, unframed
from tests.patience import patient

COMMENT = b": waiting\n\n"
LONG_S = 3600.0


async def turns(number: int) -> None:
    """Let the event loop turn."""
    for _ in range(number):
        await asyncio.sleep(0)


async def turns_until(condition: Callable[[], bool], *, pause_s: float = 0.0) -> None:
    """Let the event loop turn until it holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(pause_s)
    pytest.fail("it never held")


class Answering:
    """The answer to one call, as uvicorn sees it, whose output the test pushes."""

    def __init__(
        self,
        steps: Callable[[Generation], Steps] = texts,
        *,
        method: str = "POST",
        silence_s: float = LONG_S,
        num_streams: int = 1,
    ) -> None:
        self.call = WiredCall(method=method)
        self.wire, self.flow, self.cycle = self.call.wire, self.call.flow, self.call.cycle
        self.session = ScriptedSession()
        self.requests = [OpenRequest(f"{k}", from_positions=(), buffer_tokens=4) for k in range(num_streams)]
        self._num_pushed = [0] * num_streams
        streams = [CompletionStream(self.session, each, cancels_on_close=True) for each in self.requests]
        generation = Generation(streams, 1, detaches=False)
        self.task = asyncio.create_task(
            self.call.answer(EventStream(generation, steps(generation), silence_s=silence_s))
        )

    async def push(self, *pieces: str, stream: int = 0) -> None:
        """Output that the session receives in one turn, a token each; returns after the turn."""
        for text in pieces:
            chunk = Chunk(position=self._num_pushed[stream], num_tokens=1, text=text)
            self.requests[stream].push_chunk(chunk)
            self._num_pushed[stream] += 1
        await asyncio.sleep(0)

    async def waits_behind(self, event: str, comment: bytes, times: int) -> None:
        """Silence behind a first event, until so many comments have come."""
        await self.begun()
        await self.push(event)
        await turns_until(lambda: self.wire.body.count(comment) >= times, pause_s=0.01)

    def end(self) -> None:
        """The end of all output."""
        for each in self.requests:
            each.record_outcome(outcome(()))

    async def begun(self) -> None:
        """The head of the answer is written, and its task waits for output."""
        await turns_until(lambda: bool(self.wire.pieces))
        await turns(5)  # from the head to the first wait

    async def ended(self) -> None:
        async with asyncio.timeout(patient(30)):
            await self.task


async def test_an_event_is_written_in_the_turn_in_which_its_output_arrives() -> None:
    answering = Answering()
    await answering.begun()
    await answering.push("one")
    assert answering.wire.body == frames(b"one")
    await answering.push("two", "three")
    assert answering.wire.pieces[1:] == [frames(b"one"), frames(b"two", b"three")], "one write a turn"
    answering.end()
    await answering.ended()
    assert answering.wire.body == frames(b"one", b"two", b"three") + b"0\r\n\r\n"
    assert answering.cycle.response_complete


async def test_output_that_came_before_the_answer_began_is_sent_first() -> None:
    answering = Answering()
    await answering.push("early", "on")
    await answering.begun()
    await answering.push("late")
    answering.end()
    await answering.ended()
    assert answering.wire.body == frames(b"early", b"on", b"late") + b"0\r\n\r\n"


async def test_outputs_of_several_requests_are_sent_in_the_order_of_their_arrival() -> None:
    answering = Answering(num_streams=3)
    await answering.begun()
    for stream in (2, 0, 1, 1, 0):
        await answering.push(f"{stream}", stream=stream)
    answering.end()
    await answering.ended()
    assert answering.wire.body == frames(b"2", b"0", b"1", b"1", b"0") + b"0\r\n\r\n"


async def test_nothing_is_written_while_the_client_does_not_read_and_nothing_is_lost() -> None:
    answering = Answering()
    await answering.begun()
    await answering.push("1")
    answering.flow.pause_writing()
    await answering.push(*"2345")  # fills the buffer of the request
    assert not answering.requests[0].is_behind
    await answering.push("6")
    assert answering.requests[0].is_behind, "memory is bounded: the rest is fetched again later"
    assert answering.wire.body == frames(b"1")
    answering.flow.resume_writing()
    await turns_until(lambda: answering.session.asked == ["catch up"])
    await turns(1)
    assert answering.wire.body == frames(*(each.encode() for each in "12345"))
    assert answering.requests[0].next_positions == [5]
    answering.requests[0].push_chunk(Chunk(position=5, num_tokens=1, text="6"))  # as the session attaches again
    answering.end()
    await answering.ended()
    assert answering.wire.body == frames(*(each.encode() for each in "123456")) + b"0\r\n\r\n"


async def test_writing_stops_where_the_connection_is_full() -> None:
    pieces = [each * 40_000 for each in "1234"]  # two are more than may be written at once
    first, second, *others = (each.encode() for each in pieces)
    answering = Answering()
    answering.wire.fills_at = frames(first, second)
    await answering.push(*pieces[:3])
    await turns_until(lambda: answering.flow.write_paused)
    await answering.push(pieces[3])
    assert answering.wire.pieces[1:] == [frames(first, second)]
    answering.end()
    answering.flow.resume_writing()
    await answering.ended()
    assert answering.wire.body == frames(first, second, *others) + b"0\r\n\r\n"


async def test_a_stream_without_events_says_that_it_waits() -> None:
    answering = Answering(silence_s=0.01)
    await answering.waits_behind("1", COMMENT, 3)
    await answering.push("2")
    answering.end()
    await answering.ended()
    assert answering.wire.body.replace(frames(COMMENT), b"") == frames(b"1", b"2") + b"0\r\n\r\n"


async def test_a_comment_takes_no_event_with_it_where_readers_skip_what_begins_like_one() -> None:
    answering = Answering(silence_s=0.01)
    await answering.waits_behind("1\n\n", COMMENT, 1)
    await answering.push("2\n\n")
    answering.end()
    await answering.ended()
    read = [each for each in unframed(answering.wire.body).split(b"\n\n") if not each.startswith(b":")]
    assert b"".join(read) == b"12"


async def test_a_comment_among_events_with_ids_has_no_blank_line() -> None:
    """OpenAI's client would take it for the end of an event."""
    answering = Answering(silence_s=0.01)
    await answering.waits_behind("id: 7", b": waiting\n", 2)
    assert COMMENT not in answering.wire.body
    answering.end()
    await answering.ended()


async def test_a_stream_that_goes_on_has_no_comments() -> None:
    answering = Answering(silence_s=0.05)
    await answering.begun()
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 0.2
    while loop.time() < end_s:
        await answering.push("x")
        await asyncio.sleep(0)
    assert COMMENT not in answering.wire.body
    answering.end()
    await answering.ended()


async def test_events_wait_for_what_their_making_needs() -> None:
    may_go_on = asyncio.Event()

    async def ready() -> None:
        await may_go_on.wait()

    def steps(generation: Generation) -> Steps:
        for step in texts(generation):
            if step == b"2":
                yield ready
            yield step

    answering = Answering(steps)
    await answering.begun()
    await answering.push("1", "2", "3")
    await turns(5)
    assert answering.wire.body == frames(b"1")
    may_go_on.set()
    answering.end()
    await answering.ended()
    assert answering.wire.body == frames(b"1", b"2", b"3") + b"0\r\n\r\n"


@pytest.mark.parametrize("is_told", [False, True])
async def test_what_was_waited_for_fails_in_the_step_that_needs_it(is_told: bool) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise RuntimeError("a fault")

    def steps(generation: Generation) -> Steps:
        yield b"1"
        try:
            yield fail
        except RuntimeError:
            if is_told:
                yield b"failed"
                return
            raise

    answering = Answering(steps)
    if is_told:
        await answering.ended()
        assert answering.wire.body == frames(b"1", b"failed") + b"0\r\n\r\n"
    else:
        with pytest.raises(RuntimeError, match="a fault"):
            await answering.ended()
        assert not answering.cycle.response_complete


@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_reader_that_leaves_ends_the_stream_and_cancels_its_request(is_paused: bool) -> None:
    has_ended = []

    def steps(generation: Generation) -> Steps:
        try:
            yield from texts(generation)
        finally:
            has_ended.append(True)

    answering = Answering(steps)
    await answering.begun()
    await answering.push("1")
    if is_paused:
        answering.flow.pause_writing()
        await answering.push("2")
    answering.call.leave()
    await answering.push("3")
    await answering.ended()
    assert (answering.session.asked, has_ended) == (["cancel"], [True])
    assert answering.wire.body == frames(b"1"), "nothing is written to a connection that is gone"


@pytest.mark.parametrize("begins", [False, True])
async def test_a_fault_of_the_steps_ends_the_answer_and_no_other_request(begins: bool) -> None:
    def steps(generation: Generation) -> Steps:
        if not begins:
            raise RuntimeError("a fault")
        yield None
        raise RuntimeError("a fault")

    answering = Answering(steps)
    await answering.begun()
    await answering.push("1")  # the session goes on: this raises nothing
    with pytest.raises(RuntimeError, match="a fault"):
        await answering.ended()
    assert answering.session.asked == ["cancel"]
    assert not answering.cycle.response_complete


async def test_a_request_for_the_head_alone_gets_no_body() -> None:
    answering = Answering(method="HEAD")
    await answering.begun()
    await answering.push("1")
    answering.end()
    await answering.ended()
    assert answering.wire.body == b"" and answering.cycle.response_complete
