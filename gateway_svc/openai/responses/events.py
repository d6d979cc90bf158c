"""Events of a streamed response, numbered so that every stream of a response has the same ones.

There is an event for each token with text, however the output arrives. A stream that resumes makes the events from the
beginning, and leaves out those that its reader has.
"""

from typing import Any

import orjson

import quire
from gateway_svc.api_error import ApiError
from gateway_svc.event_stream import named_event, with_id
from gateway_svc.openai.errors import error_object
from gateway_svc.openai.responses.output import Output, message_item, text_part
from gateway_svc.openai.responses.response_object import ResponseHead, Snapshot, item_status
from gateway_svc.single_tokens import single_tokens

_LAST_EVENTS = {"completed": "response.completed", "failed": "response.failed"}  # all others: response.incomplete


class ResponseEvents:
    """Events of one stream. Call `begin`, `add` for each chunk, and `end`; each returns the events to send."""

    def __init__(self, head: ResponseHead, output: Output, *, after: int) -> None:
        """`after`: number of the last event that the reader has; -1: none."""
        self._head = head
        self._output = output
        self._after = after
        self._next = 0
        self._place = {"item_id": head.item_id, "output_index": 0, "content_index": 0}

    def begin(self) -> bytes:
        """Events before any output."""
        status = "queued" if self._head.annotation.background else "in_progress"
        response = self._head.beginning(status)
        return self._event("response.created", response=response) + self._event(f"response.{status}", response=response)

    async def add(self, chunk: quire.Chunk) -> bytes:
        """Events of a chunk, one for each token that has text or log-probabilities."""
        events = []
        for token in single_tokens(chunk):
            if not self._output.num_tokens and token.num_tokens:
                events.append(self._begin_item())
            logprobs = await self._output.add(token)
            if token.text or logprobs:
                delta = {"delta": token.text, "logprobs": logprobs}
                events.append(self._event("response.output_text.delta", **self._place, **delta))
        return b"".join(events)

    def end(self, outcome: quire.Outcome) -> bytes:
        """Events of the end."""
        response = self._head.at(Snapshot.of_end(outcome, self._output))
        status = response["status"]
        events = [self._end_item(item_status(status))] if self._output.num_tokens else []
        events.append(self._event(_LAST_EVENTS.get(status, "response.incomplete"), response=response))
        return b"".join(events)

    def error(self, error: ApiError) -> bytes:
        """Event of an error that ends this stream and not the response. It has no number of its own."""
        number = max(0, self._after, self._next - 1)  # so that resuming after it leaves out nothing
        details = error_object(error)["error"]
        data = {**details, "type": "error", "sequence_number": number, "error": details}
        return named_event("error", orjson.dumps(data))

    def _begin_item(self) -> bytes:
        head = self._head
        began = b""
        if head.annotation.background:
            began = self._event("response.in_progress", response=head.beginning("in_progress"))
        item = message_item(head.item_id, "in_progress", [])
        return (
            began
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._place, part=text_part("", []))
        )

    def _end_item(self, status: Any) -> bytes:
        text, logprobs = self._output.text, self._output.logprobs
        part = text_part(text, logprobs)
        item = message_item(self._head.item_id, status, [part])
        return (
            self._event("response.output_text.done", **self._place, text=text, logprobs=logprobs)
            + self._event("response.content_part.done", **self._place, part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._next = self._next, self._next + 1
        if number <= self._after:
            return b""
        data = orjson.dumps({"type": kind, "sequence_number": number, **fields})
        return with_id(str(number), named_event(kind, data))
