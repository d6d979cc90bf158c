"""The form of an answer that completions and chat completions share: objects with choices, whole or as events."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

import quire
from gateway_svc.answering import Call
from gateway_svc.api_error import ApiError
from gateway_svc.event_stream import DONE, data_event
from gateway_svc.openai.errors import ID_HEADER, error_object
from gateway_svc.openai.fields import GenerationFields
from gateway_svc.openai.usage import usage_of


def stop_reason(cause: quire.StopCause | None) -> str | int | None:
    """Cause of an output's end in vLLM's form: the stop string, or the stop token's id; None for any other end."""
    if cause is None:
        return None
    return cause.stop_token_id if cause.stop_string is None else cause.stop_string


class CompletionCall(Call):
    """One call for completions of either kind."""

    id_header = ID_HEADER
    end = DONE

    def __init__(self, fields: GenerationFields, kind: str, model: str, request_id: str) -> None:
        super().__init__(request_id, fields.names)
        self._head = {"id": request_id, "object": kind, "created": int(time.time()), "model": model}
        self._has_usage_event = fields.has_usage_event
        self.has_continuous_usage = fields.has_continuous_usage
        # Nearly all of an event's bytes are those of each other one.
        self._before_choice = orjson.dumps(self._head)[:-1] + b',"choices":['
        self._after_choice = b'],"usage":null}' if self._has_usage_event else b"]}"

    def first_events(self, num_prompt_tokens: int) -> Iterable[bytes]:
        """Events before any output: none."""
        return ()

    def choice_event(self, choice: dict[str, Any], **more: Any) -> bytes:
        """The event of one choice, with the usage so far, if asked for; else it comes with the last event.

        `more`: further members of the event.
        """
        after = self._after_choice
        if self.has_continuous_usage:
            so_far = quire.Usage(prompt_tokens=self.num_prompt_tokens, completion_tokens=self.num_output_tokens)
            after = b'],"usage":' + orjson.dumps(usage_of(so_far)) + b"}"
        if more:
            after = b"]," + orjson.dumps(more)[1:-1] + after[1:]
        return data_event(self._before_choice + orjson.dumps(choice) + after)

    def last_event(self, usage: quire.Usage) -> bytes:
        """The event with the usage, after all outputs; empty if it was not asked for."""
        if not self._has_usage_event:
            return b""
        return data_event(self.to_json([], usage))

    def error_event(self, error: ApiError) -> bytes:
        """The event that ends an answer which failed."""
        return data_event(orjson.dumps(error_object(error)))

    def to_json(self, choices: Sequence[dict[str, Any]], usage: quire.Usage, **more: Any) -> bytes:
        """JSON of choices with the usage, and with more members."""
        return orjson.dumps({**self._head, "choices": choices, "usage": usage_of(usage), **more})
