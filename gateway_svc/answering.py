"""The answer to a call: whole, or as events; the same for every API. Knows no form of an answer."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from starlette.responses import Response

import quire
from gateway_svc.api_error import ApiError, from_quire
from gateway_svc.event_stream import EventStream, Steps, Wait, next_turn, single_events
from gateway_svc.generation import Generation
from gateway_svc.grammar_faults import GrammarFaults
from gateway_svc.resumption import EventCounts
from gateway_svc.single_tokens import MOST_AT_ONCE, single_tokens


class Call(ABC):
    """One call, which knows the form of its answer."""

    id_header: ClassVar[str]  # that has the request's id
    end: ClassVar[bytes] = b""  # behind all events, also behind an error

    def __init__(self, request_id: str, names: Mapping[str, str]) -> None:
        """Name the call's requests. names: of its fields, by the SDK's keywords."""
        self.request_id = request_id
        self.names = names
        self.faults: GrammarFaults | None = None  # of the grammar of its calls
        self.num_prompt_tokens = 0  # of all prompts; `answer` keeps both counts
        self.num_output_tokens = 0  # of all outputs so far, in a streamed answer

    def begin(self, accepted: Sequence[quire.Accepted]) -> None:
        """Begin to answer requests that were accepted, one for each prompt."""
        self.num_prompt_tokens = sum(each.num_prompt_tokens for each in accepted)

    @abstractmethod
    async def whole(self, completions: Sequence[quire.Completion], usage: quire.Usage) -> bytes:
        """The whole answer."""

    @abstractmethod
    def first_events(self, num_prompt_tokens: int) -> Iterable[bytes]:
        """Events before any output."""

    def preparation(self, output: int, chunk: quire.Chunk) -> Wait | None:
        """The wait that the events of a chunk need before they can be made; None: none."""
        return None

    @abstractmethod
    def event(self, output: int, chunk: quire.Chunk) -> bytes:
        """The events of a chunk; empty if it has nothing to say yet."""

    @abstractmethod
    def last_event(self, usage: quire.Usage) -> bytes:
        """The events after all outputs; empty if there are none."""

    @abstractmethod
    def error_event(self, error: ApiError) -> bytes:
        """The event that ends an answer which failed."""

    def failure(self, error: quire.QuireError) -> ApiError:
        """The error of the call's requests, in the words of its fields."""
        told = error if self.faults is None else self.faults.told(error)
        return from_quire(told, self.names, self.request_id)


async def answer(generation: Generation, call: Call, *, streamed: bool, counts: EventCounts | None = None) -> Response:
    """The answer to a call whose requests were submitted; with `counts` its events have ids.

    Raises ApiError for a refusal or a failure; the error of an answer whose events have begun is an event.
    """
    headers = {call.id_header: call.request_id}
    try:
        accepted = await generation.accepted()
        if counts is not None:
            counts.check_attached(all(each.attached for each in accepted))
        call.begin(accepted)
        if streamed:
            return EventStream(generation, _steps(generation, call, counts), headers)
        completions = await generation.completions()
        body = await call.whole(completions, generation.usage)
    except quire.QuireError as error:
        await generation.close()
        raise call.failure(error) from error
    except BaseException:  # the reader has gone
        await generation.close()
        raise
    return Response(body, media_type="application/json", headers=headers)


def _steps(generation: Generation, call: Call, counts: EventCounts | None) -> Steps:
    try:
        if counts is None or not counts.is_resumed:
            yield from call.first_events(call.num_prompt_tokens)
        while (found := generation.take()) is not None or not generation.is_at_end:
            if found is None:
                yield None
                continue
            output, chunk = found
            if preparation := call.preparation(output, chunk):
                yield preparation
            yield from _of_chunk(call, output, chunk, counts)
        last = call.last_event(generation.usage)
        if last and (counts is None or (last := counts.last(last))):
            yield last
    except quire.QuireError as error:
        yield call.error_event(call.failure(error))
    if call.end:
        yield call.end


def _of_chunk(call: Call, output: int, chunk: quire.Chunk, counts: EventCounts | None) -> Steps:
    """Events of a chunk: as few as there can be, or those of each token if they have ids.

    Those of very many tokens with log-probabilities are made in several turns.
    """
    if counts is None:
        call.num_output_tokens += chunk.num_tokens
        if event := call.event(output, chunk):
            yield event
        return
    events = []
    for number, token in enumerate(single_tokens(chunk), 1):
        call.num_output_tokens += token.num_tokens
        events += [counts.numbered(output, each) for each in single_events(call.event(output, token))]
        if token.logprobs and not number % MOST_AT_ONCE:
            if made := b"".join(events):
                yield made
            yield next_turn
            events = []
    if made := b"".join(events):
        yield made
