"""The answer to a call: whole, or as events; the same for every kind of completion."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson
from starlette.responses import Response

import quire
from gateway_svc.api_error import from_quire
from gateway_svc.event_stream import DONE, EventStream, data_event
from gateway_svc.generation import Generation
from gateway_svc.openai.errors import error_object
from gateway_svc.openai.fields import GenerationFields
from gateway_svc.openai.usage import usage_of


class Call(ABC):
    """One call, which knows the form of its answer."""

    def __init__(self, fields: GenerationFields, kind: str, model: str, request_id: str) -> None:
        self.request_id = request_id
        self.names = fields.names
        self._head = {"id": request_id, "object": kind, "created": int(time.time()), "model": model}
        self._has_usage_event = fields.has_usage_event

    @abstractmethod
    async def whole(self, completions: Sequence[quire.Completion], usage: quire.Usage) -> bytes:
        """The whole answer."""

    def first_events(self) -> list[bytes]:
        """Events before any output."""
        return []

    @abstractmethod
    async def event(self, output: int, chunk: quire.Chunk) -> bytes | None:
        """The event of a chunk; None if it has nothing to say yet."""

    def choice_event(self, choice: dict[str, Any]) -> bytes:
        """The event of one choice; the usage comes with the last event, if asked for."""
        usage = {"usage": None} if self._has_usage_event else {}
        return data_event(orjson.dumps({**self._head, "choices": [choice], **usage}))

    def last_event(self, usage: quire.Usage) -> bytes:
        """The event with the usage, after all outputs; empty if it was not asked for."""
        if not self._has_usage_event:
            return b""
        return data_event(self.to_json([], usage))

    def to_json(self, choices: Sequence[dict[str, Any]], usage: quire.Usage) -> bytes:
        """JSON of choices with the usage."""
        return orjson.dumps({**self._head, "choices": choices, "usage": usage_of(usage)})


async def answer(generation: Generation, call: Call, *, streamed: bool) -> Response:
    """The answer to a call whose requests were submitted.

    Raises ApiError for a refusal or a failure; the error of an answer whose events have begun is an event.
    """
    headers = {"x-request-id": call.request_id}
    try:
        await generation.accepted()
        if streamed:
            return EventStream(_events(generation, call), headers)
        completions = await generation.completions()
        body = await call.whole(completions, generation.usage)
    except quire.QuireError as error:
        await generation.close()
        raise from_quire(error, call.names) from error
    except BaseException:  # the reader has gone
        await generation.close()
        raise
    return Response(body, media_type="application/json", headers=headers)


async def _events(generation: Generation, call: Call) -> AsyncGenerator[bytes, None]:
    try:
        for event in call.first_events():
            yield event
        async for output, chunk in generation.chunks():
            found = await call.event(output, chunk)
            if found is not None:
                yield found
        if last := call.last_event(generation.usage):
            yield last
    except quire.QuireError as error:
        yield data_event(orjson.dumps(error_object(from_quire(error, call.names))))
    finally:
        await generation.close()
    yield DONE
