"""Events of a streamed response, numbered so that every stream of a response has the same ones.

Events are those of single tokens, however the output arrives. A stream that resumes makes the events from the
beginning, and leaves out those that its reader has.
"""

from collections.abc import Sequence
from typing import Any

import orjson

import quire
from gateway_svc.api_error import ApiError
from gateway_svc.event_stream import named_event, with_id
from gateway_svc.openai.errors import error_object
from gateway_svc.openai.responses.output import Addition, ItemStatus, Output, OutputItem, content_part
from gateway_svc.openai.responses.response_object import ResponseHead, Snapshot, item_status
from gateway_svc.single_tokens import single_tokens
from gateway_svc.text_templates import TextTemplates

_LAST_EVENTS = {"completed": "response.completed", "failed": "response.failed"}  # all others: response.incomplete
_TEXTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


class ResponseEvents:
    """Events of one stream. Call `begin`, `add` for each chunk, and `end`; each returns the events to send."""

    def __init__(self, head: ResponseHead, output: Output, *, after: int) -> None:
        """`after`: number of the last event that the reader has; -1: none."""
        self._head = head
        self._output = output
        self._after = after
        self._next = 0
        self._item: OutputItem | None = None  # the last that has begun
        self._text_deltas = TextTemplates(lambda item, text: _delta_fields(output.items[item], text, ()))

    def begin(self) -> bytes:
        """Events before any output."""
        status = "queued" if self._head.annotation.background else "in_progress"
        response = self._head.beginning(status)
        return self._event("response.created", response=response) + self._event(f"response.{status}", response=response)

    def add(self, chunk: quire.Chunk) -> bytes:
        """Events of a chunk, token by token: of each piece of an item, and of items that begin and end.

        Its log-probabilities name known tokens.
        """
        events = []
        for token in single_tokens(chunk):
            if not self._output.num_tokens and token.num_tokens and self._head.annotation.background:
                events.append(self._event("response.in_progress", response=self._head.beginning("in_progress")))
            events += map(self._addition, self._output.add(token))
        return b"".join(events)

    def end(self, outcome: quire.Outcome) -> bytes:
        """Events of the end."""
        events = [self._addition(each) for each in self._output.end()]
        snapshot = Snapshot.of_end(outcome, self._output)
        response = self._head.at(snapshot)
        status = response["status"]
        if self._item is not None:
            events.append(self._end_item(self._item, item_status(status, snapshot)))
        events.append(self._event(_LAST_EVENTS.get(status, "response.incomplete"), response=response))
        return b"".join(events)

    def error(self, error: ApiError) -> bytes:
        """Event of an error that ends this stream and not the response. It has no number of its own."""
        number = max(0, self._after, self._next - 1)  # so that resuming after it leaves out nothing
        details = error_object(error)["error"]
        data = {**details, "type": "error", "sequence_number": number, "error": details}
        return named_event("error", orjson.dumps(data))

    def _addition(self, addition: Addition) -> bytes:
        began, item = b"", addition.item
        if item is not self._item:
            if self._item is not None:
                began = self._end_item(self._item, "completed")
            began += self._begin_item(item)
            self._item = item
        if not addition.text and not addition.logprobs:
            return began
        if addition.logprobs:
            fields = _delta_fields(item, addition.text, addition.logprobs)
        else:  # nearly all
            fields = self._text_deltas.fill(item.index, addition.text)
        return began + self._numbered(f"{_TEXTS[item.kind]}.delta", fields)

    def _begin_item(self, item: OutputItem) -> bytes:
        added = self._event("response.output_item.added", output_index=item.index, item=item.begun())
        if item.kind == "function_call":
            return added
        return added + self._event("response.content_part.added", **_place(item), part=content_part(item.kind, "", []))

    def _end_item(self, item: OutputItem, status: ItemStatus) -> bytes:
        kind = f"{_TEXTS[item.kind]}.done"
        match item.kind:
            case "function_call":
                done = self._event(kind, **_place(item), name=item.name, arguments=item.text)
            case "reasoning":
                done = self._event(kind, **_place(item), text=item.text)
            case "message":
                done = self._event(kind, **_place(item), text=item.text, logprobs=item.logprobs)
        if item.kind != "function_call":
            done += self._event("response.content_part.done", **_place(item), part=item.part)
        return done + self._event("response.output_item.done", output_index=item.index, item=item.made(status))

    def _event(self, kind: str, **fields: Any) -> bytes:
        return self._numbered(kind, orjson.dumps(fields))

    def _numbered(self, kind: str, fields: bytes) -> bytes:
        """The next event, with more fields, as JSON; empty if the reader has it."""
        number, self._next = self._next, self._next + 1
        if number <= self._after:
            return b""
        data = b'{"type":"%b","sequence_number":%d,%b' % (kind.encode(), number, fields[1:])
        return with_id(str(number), named_event(kind, data))


def _delta_fields(item: OutputItem, text: str, logprobs: Sequence[dict[str, Any]]) -> bytes:
    """Fields of the event of a piece of an item, as JSON."""
    extra = {"logprobs": logprobs} if item.kind == "message" else {}
    return orjson.dumps({**_place(item), "delta": text, **extra})


def _place(item: OutputItem) -> dict[str, Any]:
    place = {"item_id": item.id, "output_index": item.index}
    return place if item.kind == "function_call" else {**place, "content_index": 0}
