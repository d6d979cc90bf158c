"""The answer to a call: whole, or as events; the same for every API. Knows no form of an answer."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import ClassVar

from starlette.responses import Response

import quire
from gateway_svc.api_error import ApiError, from_quire
from gateway_svc.event_stream import EventStream
from gateway_svc.generation import Generation


class Call(ABC):
    """One call, which knows the form of its answer."""

    id_header: ClassVar[str]  # that has the request's id
    end: ClassVar[bytes] = b""  # behind all events, also behind an error

    def __init__(self, request_id: str, names: Mapping[str, str]) -> None:
        """Name the call's requests. names: of its fields, by the SDK's keywords."""
        self.request_id = request_id
        self.names = names

    @abstractmethod
    async def whole(self, completions: Sequence[quire.Completion], usage: quire.Usage) -> bytes:
        """The whole answer."""

    @abstractmethod
    def first_events(self, num_prompt_tokens: int) -> Iterable[bytes]:
        """Events before any output."""

    @abstractmethod
    async def event(self, output: int, chunk: quire.Chunk) -> bytes | None:
        """The events of a chunk; None if it has nothing to say yet."""

    @abstractmethod
    def last_event(self, usage: quire.Usage) -> bytes:
        """The events after all outputs; empty if there are none."""

    @abstractmethod
    def error_event(self, error: ApiError) -> bytes:
        """The event that ends an answer which failed."""

    def failure(self, error: quire.QuireError) -> ApiError:
        """The error of the call's requests, in the words of its fields."""
        return from_quire(error, self.names, self.request_id)


async def answer(generation: Generation, call: Call, *, streamed: bool) -> Response:
    """The answer to a call whose requests were submitted.

    Raises ApiError for a refusal or a failure; the error of an answer whose events have begun is an event.
    """
    headers = {call.id_header: call.request_id}
    try:
        num_prompt_tokens = await generation.accepted()
        if streamed:
            return EventStream(_events(generation, call, num_prompt_tokens), headers)
        completions = await generation.completions()
        body = await call.whole(completions, generation.usage)
    except quire.QuireError as error:
        await generation.close()
        raise call.failure(error) from error
    except BaseException:  # the reader has gone
        await generation.close()
        raise
    return Response(body, media_type="application/json", headers=headers)


async def _events(generation: Generation, call: Call, num_prompt_tokens: int) -> AsyncGenerator[bytes, None]:
    try:
        for event in call.first_events(num_prompt_tokens):
            yield event
        async for output, chunk in generation.chunks():
            found = await call.event(output, chunk)
            if found is not None:
                yield found
        if last := call.last_event(generation.usage):
            yield last
    except quire.QuireError as error:
        yield call.error_event(call.failure(error))
    finally:
        await generation.close()
    if call.end:
        yield call.end
