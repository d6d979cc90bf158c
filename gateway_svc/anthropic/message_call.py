"""The form of a message: the object with content blocks, whole or as events."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

import quire
from gateway_svc.answering import Call
from gateway_svc.anthropic.errors import ID_HEADER, error_object
from gateway_svc.anthropic.fields import MessageRequest
from gateway_svc.api_error import ApiError
from gateway_svc.event_stream import named_event

_STOP_REASONS = {quire.FinishReason.STOP: "end_turn", quire.FinishReason.LENGTH: "max_tokens"}


class MessageCall(Call):
    """One request for a message: makes its objects of the output."""

    id_header = ID_HEADER

    def __init__(self, body: MessageRequest, model: str, request_id: str) -> None:
        super().__init__(request_id, body.names)
        self._model = model
        self._is_block_open = False
        self._finish: quire.Finish | None = None

    async def whole(self, completions: Sequence[quire.Completion], usage: quire.Usage) -> bytes:
        """The whole message."""
        sample = completions[0].samples[0]
        content = [{"type": "text", "text": sample.text}] if sample.text else []
        stop = stop_fields(sample.finish_reason, sample.stop_cause)
        return orjson.dumps(self._message(content, stop, usage_object(usage)))

    def first_events(self, num_prompt_tokens: int) -> Iterable[bytes]:
        """The message without content; which of its tokens were cached is known at the end."""
        usage = usage_object(quire.Usage(prompt_tokens=num_prompt_tokens))
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return (_event("message_start", message=message),)

    async def event(self, output: int, chunk: quire.Chunk) -> bytes | None:
        """The events of a chunk; None if it has no text."""
        self._finish = chunk.finish or self._finish
        if not chunk.text:
            return None
        begin = b"" if self._is_block_open else _block_start()
        self._is_block_open = True
        return begin + _event("content_block_delta", index=0, delta={"type": "text_delta", "text": chunk.text})

    def last_event(self, usage: quire.Usage) -> bytes:
        """The end of the content and of the message."""
        assert self._finish is not None, "the output has ended"
        end = _event("content_block_stop", index=0) if self._is_block_open else b""
        stop = stop_fields(self._finish.reason, self._finish.cause)
        return end + _event("message_delta", delta=stop, usage=usage_object(usage)) + _event("message_stop")

    def error_event(self, error: ApiError) -> bytes:
        """The event that ends a message which failed."""
        return named_event("error", orjson.dumps(error_object(error, self.request_id)))

    def _message(
        self, content: Sequence[dict[str, Any]], stop: Mapping[str, str | None], usage: dict[str, int]
    ) -> dict[str, Any]:
        head = {"id": self.request_id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **stop, "usage": usage}


def stop_fields(reason: quire.FinishReason, cause: quire.StopCause | None) -> dict[str, str | None]:
    """The fields that say why a message ended."""
    if cause is not None and cause.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": cause.stop_string}
    return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}


def usage_object(usage: quire.Usage) -> dict[str, int]:
    """Counts of tokens; those of the input that were cached are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _block_start() -> bytes:
    return _event("content_block_start", index=0, content_block={"type": "text", "text": ""}) + _event("ping")


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, orjson.dumps({"type": kind, **fields}))
