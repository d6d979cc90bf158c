"""The form of a message: the object with content blocks, whole or as events."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

import quire
from gateway_svc.answering import Call
from gateway_svc.anthropic.content import Event, MessageContent, text_delta, to_json
from gateway_svc.anthropic.errors import ID_HEADER, error_object
from gateway_svc.anthropic.fields import MessageRequest
from gateway_svc.api_error import ApiError
from gateway_svc.event_stream import named_event
from gateway_svc.text_templates import TextTemplates
from gateway_svc.tool_use import ends_within_call
from quire.parsing.answer_format import AnswerFormat
from quire.parsing.answer_parser import AnswerParser

_STOP_REASONS = {quire.FinishReason.STOP: "end_turn", quire.FinishReason.LENGTH: "max_tokens"}


class MessageCall(Call):
    """One request for a message: makes its objects of the output."""

    id_header = ID_HEADER

    def __init__(self, body: MessageRequest, model: str, request_id: str) -> None:
        super().__init__(request_id, body.names)
        self._model = model
        self._content = MessageContent(
            may_call_several=body.tool_use.may_call_several,
            has_thinking=body.thinking is None or body.thinking.is_on,
            omits_thinking=body.thinking is not None and body.thinking.display == "omitted",
        )
        self._has_pinged = False
        self._finish: quire.Finish | None = None
        self._format = AnswerFormat()
        self._parser: AnswerParser | None = None
        self._text_deltas = TextTemplates(lambda block, text: _event(text_delta(block, text)))

    def read(self, format: AnswerFormat) -> None:
        """Read the answer in this format."""
        self._format = format

    def begin(self, accepted: Sequence[quire.Accepted]) -> None:
        """See Call."""
        super().begin(accepted)
        self._parser = AnswerParser(self._format, self.request_id, in_reasoning=accepted[0].in_reasoning)

    async def whole(self, completions: Sequence[quire.Completion], usage: quire.Usage) -> bytes:
        """The whole message."""
        sample = completions[0].samples[0]
        assert self._parser is not None, "it has begun"
        self._content.add(self._parser.push(sample.text) + self._parser.end())
        stop = stop_fields(sample.finish_reason, sample.stop_cause, arguments=self._content.last_arguments)
        return to_json(self._message(self._content.blocks, stop, usage_object(usage)))

    def first_events(self, num_prompt_tokens: int) -> Iterable[bytes]:
        """The message without content; which of its tokens were cached is known at the end."""
        usage = usage_object(quire.Usage(prompt_tokens=num_prompt_tokens))
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return (_event({"type": "message_start", "message": message}),)

    def event(self, output: int, chunk: quire.Chunk) -> bytes:
        """See Call."""
        assert self._parser is not None, "it has begun"
        deltas = self._parser.push(chunk.text)
        match deltas:
            case (quire.ContentDelta(text),) if chunk.finish is None and self._content.is_in_text:  # nearly all
                return self._text_deltas.fill(self._content.add_text(text), text)
        events = self._content.add(deltas)
        if chunk.finish is not None:
            self._finish = chunk.finish
            events += self._content.add(self._parser.end())
        return b"".join(map(self._with_ping, events))

    def last_event(self, usage: quire.Usage) -> bytes:
        """The end of the content and of the message."""
        assert self._finish is not None, "the output has ended"
        stop = stop_fields(self._finish.reason, self._finish.cause, arguments=self._content.last_arguments)
        end = {"type": "message_delta", "delta": stop, "usage": usage_object(usage)}
        return b"".join(map(_event, [*self._content.end(), end, {"type": "message_stop"}]))

    def error_event(self, error: ApiError) -> bytes:
        """The event that ends a message which failed."""
        return named_event("error", orjson.dumps(error_object(error, self.request_id)))

    def _with_ping(self, event: Event) -> bytes:
        """The event; a ping comes behind the first."""
        if self._has_pinged:
            return _event(event)
        self._has_pinged = True
        return _event(event) + _event({"type": "ping"})

    def _message(
        self, content: Sequence[dict[str, Any]], stop: Mapping[str, str | None], usage: dict[str, int]
    ) -> dict[str, Any]:
        head = {"id": self.request_id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **stop, "usage": usage}


def stop_fields(
    reason: quire.FinishReason, cause: quire.StopCause | None, *, arguments: str | None
) -> dict[str, str | None]:
    """The fields that say why a message ended; `arguments` are those of its last call, None: it has no calls."""
    if cause is not None and cause.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": cause.stop_string}
    if arguments is not None and reason is quire.FinishReason.STOP and not ends_within_call(cause, arguments):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}


def usage_object(usage: quire.Usage) -> dict[str, int]:
    """Counts of tokens; those of the input that were cached are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _event(event: Event) -> bytes:
    return named_event(event["type"], orjson.dumps(event))
