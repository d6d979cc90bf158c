"""The output of one request as an async iterator, and its assembly into a Completion.

A stream is a reader. Closing one that submitted its request cancels the request; closing one that attached to it
leaves the request alone.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from quire.answer_reader import AnswerReader
from quire.client_home import refuse_copy
from quire.errors import QuireError, RequestCancelledError, RequestExpiredError, RequestFailedError
from quire.open_request import OpenRequest
from quire.params import ChatMessage
from quire.parsing.deltas import parsed_answer
from quire.results import Accepted, Chunk, Completion, Outcome, RequestState, Sample
from quire.session import Placed


class CompletionStream:
    """Chunks of one request as they arrive: those of a sample are in order, and each position comes once.

    Chunks of several samples alternate; `Chunk.index` names the sample. A sample ends with the chunk that has a
    `finish`, the iteration with the request. Ranked samples (beams, and `best_of` beyond `n`) come at the end; the
    prefix that all beams share is streamed before, in sample 0.

    A program that reads many streams at once may `listen` instead, and `take` what has arrived: no task has to wait for
    each. Use it as a context manager where the loop may be left early. Iteration raises RequestCancelledError,
    RequestExpiredError or RequestFailedError, after the output so far, if the request ended so; OverloadedError or
    UnavailableError if it was refused or the server stayed away; InvalidRequestError if it can never be served; and
    RuntimeError in another event loop than the one in which it was opened.
    """

    __slots__ = ("__weakref__", "_answers", "_chunks", "_let_go", "_loop", "_num_tokens", "_request", "_session")

    def __init__(
        self,
        session: Placed,
        request: OpenRequest,
        *,
        cancels_on_close: bool,
        answers: AnswerReader | None = None,
    ) -> None:
        self._session = session
        self._request = request
        self._answers = answers
        self._let_go = partial(_let_go, session, request, cancels_on_close)  # does not keep the stream
        self._loop = asyncio.get_running_loop()
        self._chunks: list[Chunk] = []  # of the iteration
        self._num_tokens = 0  # that were read

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def outcome(self) -> Outcome | None:
        """The end of the request; None before the iteration has ended."""
        return self._request.outcome

    async def accepted(self) -> Accepted:
        """Waits until the request is durable."""
        self._check_loop()
        return await self._request.wait_accepted()

    def __aiter__(self) -> "CompletionStream":
        return self

    async def __anext__(self) -> Chunk:
        self._check_loop()
        chunk = await self._request.next_chunk(self._session.catch_up)
        if chunk is None:
            _raise_unless_finished(self._request, self._num_tokens)
            raise StopAsyncIteration
        self._num_tokens += chunk.num_tokens
        if self._answers is not None:
            chunk = self._answers.read(await self.accepted(), chunk)
        self._chunks.append(chunk)
        return chunk

    def listen(self, on_arrival: Callable[[], None]) -> None:
        """Call back for each chunk that has arrived or arrives, and for the end, until the stream is closed.

        The callback is called in the event loop's turn, and maybe more often than that. It must not block.
        """
        self._request.listen(on_arrival)

    def take(self) -> Chunk | None:
        """The next chunk if it has arrived, else None; None at the end, too. Raises as iteration.

        Chunks that were taken are no part of `completion`, and have no deltas.
        """
        chunk = self._request.take_chunk(self._session.catch_up)
        if chunk is not None:
            self._num_tokens += chunk.num_tokens
        elif self._request.outcome is not None:
            _raise_unless_finished(self._request, self._num_tokens)
        return chunk

    @property
    def is_at_end(self) -> bool:
        """True once the request has ended and its output was read or taken."""
        return self._request.is_read

    async def completion(self) -> Completion:
        """Reads to the end and returns the whole output, from where the stream began."""
        async for _ in self:
            pass
        accepted = await self.accepted()
        assert self._request.outcome is not None  # the stream has ended without raising
        return _assemble(accepted, self._chunks, self._request.outcome, is_parsed=self._answers is not None)

    def detach(self) -> None:
        """Stops reading; the request's on_disconnect decides whether it goes on, as if its connection was lost.

        Raises RuntimeError in another event loop.
        """
        self._check_loop()
        self._request.listen(None)
        if not self._request.has_ended:
            self._session.detach(self._request)

    async def aclose(self) -> None:
        """Closes the stream: cancels the request if this stream submitted it and it has not ended.

        Raises RuntimeError in another event loop, unless that of the stream is closed.
        """
        if not self._loop.is_closed():
            self._check_loop()
            self._let_go()

    def _check_loop(self) -> None:
        """Raises RuntimeError in another event loop, where what arrives would wake nobody."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the stream belongs to the event loop in which it was opened: read it there")

    def __reduce__(self) -> NoReturn:
        refuse_copy(self, "attach to its request_id where it is needed")

    async def __aenter__(self) -> "CompletionStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        """Closes the stream where a loop over it was left early."""
        if not self._request.has_ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._let_go)


def _let_go(session: Placed, request: OpenRequest, cancels: bool) -> None:
    request.listen(None)
    if request.has_ended:
        return
    if cancels:
        session.cancel(request)
    else:
        session.detach(request)


def _raise_unless_finished(request: OpenRequest, num_tokens: int) -> None:
    outcome = request.outcome
    assert outcome is not None  # the last chunk comes with it
    if outcome.state is RequestState.FINISHED:
        return
    where = f"request {request.request_id}, after {num_tokens} tokens of output"
    match outcome.state:
        case RequestState.CANCELLED:
            raise RequestCancelledError(f"{where}: cancelled")
        case RequestState.EXPIRED:
            is_dropped = outcome.timings.first_scheduled_s is None
            passed = "the deadline passed, or could not be met any more" if is_dropped else "the deadline passed"
            raise RequestExpiredError(f"{where}: {passed}")
        case _:
            raise RequestFailedError(f"{where}: {outcome.error or 'the server could not finish the request'}")


def _assemble(accepted: Accepted, chunks: list[Chunk], outcome: Outcome, *, is_parsed: bool) -> Completion:
    by_sample: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_sample.setdefault(chunk.index, []).append(chunk)
    samples = tuple(
        _sample(accepted.request_id, index, by_sample[index], is_parsed=is_parsed) for index in sorted(by_sample)
    )
    if not samples:
        raise _unexplained(accepted.request_id)
    return Completion(
        request_id=accepted.request_id,
        samples=samples,
        usage=outcome.usage,
        timings=outcome.timings,
        memory=outcome.memory,
        seed=accepted.seed,
        prompt_logprobs=tuple(each for chunk in chunks for each in chunk.prompt_logprobs),
    )


def _sample(request_id: str, index: int, chunks: list[Chunk], *, is_parsed: bool) -> Sample:
    finish = chunks[-1].finish
    if finish is None:
        raise _unexplained(request_id)
    return Sample(
        index=index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        finish_reason=finish.reason,
        stop_cause=finish.cause,
        logprobs=tuple(each for chunk in chunks for each in chunk.logprobs),
        score=finish.score,
        sample_index=finish.sample_index,
        message=_message(chunks) if is_parsed else None,
    )


def _message(chunks: list[Chunk]) -> ChatMessage:
    answer = parsed_answer(each for chunk in chunks for each in chunk.deltas)
    return ChatMessage("assistant", answer.content, tool_calls=answer.tool_calls, reasoning=answer.reasoning)


def _unexplained(request_id: str) -> QuireError:
    return QuireError(f"request {request_id}: the server ended it without saying why")
