"""Timers of a connection: of the silence before and within a request, and of a kept connection."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from gateway_svc.http_server import IDLE_S
from tests.gateway.raw_http import BODY, HEAD, PATIENT_S, application, read_answer, said, served
from tests.patience import patient


class Timers(asyncio.SelectorEventLoop):
    """A loop that tells of each timer of the silence, and of kept connections."""

    def __init__(self) -> None:
        super().__init__()
        self.told: asyncio.Queue[float] = asyncio.Queue()
        self.kept: asyncio.Queue[float] = asyncio.Queue()
        self.made: list[tuple[float, asyncio.TimerHandle]] = []

    def pending(self, delay: float) -> list[bool]:
        """True for each timer of this delay that has not been cancelled."""
        return [not handle.cancelled() for each, handle in self.made if each == delay]

    def call_later(  # type: ignore[override]  # arguments of any types
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if delay in (PATIENT_S, IDLE_S):
            (self.told if delay == PATIENT_S else self.kept).put_nowait(delay)
        self.made.append((delay, super().call_later(delay, callback, *args, context=context)))
        return self.made[-1][1]


def with_timers(send: Callable[[Timers], Coroutine[Any, Any, None]]) -> Timers:
    """The loop in which this has run."""
    with asyncio.Runner(loop_factory=Timers) as runner:
        timers = runner.get_loop()
        assert isinstance(timers, Timers)
        runner.run(asyncio.wait_for(send(timers), patient(30)))
        return timers


@pytest.mark.parametrize(
    "pieces", [(HEAD + b"\r\n" + BODY,), (HEAD, b"\r\n", BODY), (HEAD[:9], HEAD[9:] + b"\r\n" + BODY)]
)
def test_silence_counts_before_and_within_a_request_and_not_behind_it(pieces: Sequence[bytes]) -> None:
    answers: list[bytes] = []

    async def send(timers: Timers) -> None:
        async with served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for piece in pieces:
                await timers.told.get()
                writer.write(piece)
            answers.append(await read_answer(reader))
            writer.close()

    assert with_timers(send).told.empty()
    assert said(answers[0])["body"] == BODY.decode()


@pytest.mark.parametrize(
    ("begin", "rest"), [(HEAD + b"\r\n" + BODY[:1], BODY[1:]), (HEAD[:9], HEAD[9:] + b"\r\n" + BODY)]
)
def test_silence_begins_anew_when_the_answer_before_ends(begin: bytes, rest: bytes) -> None:
    async def send(timers: Timers) -> None:
        is_asked = asyncio.Event()

        async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == "/wait":
                await is_asked.wait()
            await application(scope, receive, send)

        async with served(waiting) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await timers.told.get()
            writer.write(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" + begin)
            await timers.told.get()
            is_asked.set()
            assert said(await read_answer(reader))["method"] == "GET"
            await timers.told.get()
            assert timers.pending(PATIENT_S) == [False, False, True]
            writer.write(rest)
            assert said(await read_answer(reader))["body"] == BODY.decode()
            assert not any(timers.pending(PATIENT_S))
            writer.close()

    with_timers(send)


@pytest.mark.parametrize("pieces", [(), (BODY,), (BODY[:1], BODY[1:])])
def test_an_answer_before_the_body_keeps_the_connection_as_long_as_others(pieces: Sequence[bytes]) -> None:
    async def send(timers: Timers) -> None:
        async with served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await timers.told.get()
            writer.write(HEAD.replace(b"/echo", b"/early") + b"\r\n")
            await timers.told.get()
            assert (await read_answer(reader)).startswith(b"HTTP/1.1 413")
            for piece in pieces:
                writer.write(piece)
                if piece is not pieces[-1]:
                    await timers.told.get()
            for _ in range(1 + bool(pieces)):
                await timers.kept.get()
            assert not any(timers.pending(PATIENT_S))
            assert timers.pending(IDLE_S) == [False] * bool(pieces) + [True]
            writer.close()

    with_timers(send)
