"""The response object: a pure function of a response's annotation, its time, its output and the state of its request.

So a stream, a retrieval and a resumption, by whichever gateway, give the same object with the same ids.
"""

from dataclasses import dataclass
from typing import Any

import quire
from gateway_svc.openai.responses.annotation import ID_PREFIX, Annotation
from gateway_svc.openai.responses.output import ItemStatus, Output, OutputItem
from gateway_svc.tool_use import ends_within_call

_LIVE = ("queued", "in_progress")
NOT_REPEATED = {"has_logprobs", "input", "tool_parser", "reasoning_parser", "is_forced", "may_call_several"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Output and state of a response at one moment."""

    state: quire.RequestState
    timings: quire.Timings
    usage: quire.Usage
    error: str
    items: list[OutputItem]
    num_tokens: int
    finish: quire.Finish | None

    @classmethod
    def of_end(cls, outcome: quire.Outcome, output: Output) -> "Snapshot":
        """The end, with the whole output."""
        return cls(
            state=outcome.state,
            timings=outcome.timings,
            usage=outcome.usage,
            error=outcome.error,
            items=output.items,
            num_tokens=output.num_tokens,
            finish=output.finish,
        )

    @classmethod
    def of_record(cls, record: quire.RequestRecord, output: Output) -> "Snapshot":
        """Snapshot of a record, which has all but log-probabilities; `output` is empty before."""
        output.add_text(record.text, len(record.token_ids))
        if record.state.is_terminal:
            output.end()
        return cls(
            state=record.state,
            timings=record.timings,
            usage=record.usage,
            error=record.error,
            items=output.items,
            num_tokens=output.num_tokens,
            finish=record.finish,
        )

    @property
    def is_cut_off(self) -> bool:
        """True if the length of the output, or of the context, ended it."""
        return self.finish is not None and self.finish.reason is quire.FinishReason.LENGTH

    @property
    def is_within_call(self) -> bool:
        """True if a stop string or stop token ended the output within a call."""
        is_call = bool(self.items) and self.items[-1].kind == "function_call"
        return is_call and self.finish is not None and ends_within_call(self.finish.cause, self.items[-1].text)


class ResponseHead:
    """Fields of a response that do not change."""

    def __init__(self, response_id: str, annotation: Annotation, created_unix_s: float) -> None:
        self.response_id = response_id
        self.stem = response_id.removeprefix(ID_PREFIX)  # of the ids of items
        self.annotation = annotation
        self._created_unix_s = created_unix_s
        self._echoed = annotation.model_dump(exclude=NOT_REPEATED)

    def beginning(self, status: str) -> dict[str, Any]:
        """The object before there is output."""
        return self._made(status, [], None, None, None)

    def at(self, snapshot: Snapshot) -> dict[str, Any]:
        """The object at a moment; usage comes with the end."""
        status = self.status(snapshot)
        items = [each.made("completed") for each in snapshot.items[:-1]]
        items += [each.made(item_status(status, snapshot)) for each in snapshot.items[-1:]]
        completed_at = None
        if status == "completed":
            completed_at = int(self._created_unix_s + (snapshot.timings.finished_s or 0.0))
        usage = None if status in _LIVE else usage_object(snapshot.usage)
        return self._made(status, items, usage, completed_at, _error(snapshot))

    def status(self, snapshot: Snapshot) -> str:
        """Status of the response."""
        match snapshot.state:
            case quire.RequestState.FINISHED:
                return "incomplete" if snapshot.is_cut_off else "completed"
            case quire.RequestState.CANCELLED:
                return "cancelled"
            case quire.RequestState.FAILED | quire.RequestState.EXPIRED:
                return "failed"
            case _:
                has_begun = snapshot.num_tokens or snapshot.timings.first_scheduled_s is not None
                return "queued" if self.annotation.background and not has_begun else "in_progress"

    def _made(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: dict[str, Any] | None,
        completed_at: int | None,
        error: dict[str, Any] | None,
    ) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": int(self._created_unix_s),
            "completed_at": completed_at,
            "status": status,
            **self._echoed,
            "output": output,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": usage,
            "service_tier": "default",
        }


def item_status(status: str, snapshot: Snapshot) -> ItemStatus:
    """Status of the last item of a response with this status; those before it are completed."""
    if status in _LIVE:
        return "in_progress"
    return "completed" if status == "completed" and not snapshot.is_within_call else "incomplete"


def _error(snapshot: Snapshot) -> dict[str, Any] | None:
    match snapshot.state:
        case quire.RequestState.FAILED:
            message = snapshot.error or "the server could not finish the response"
        case quire.RequestState.EXPIRED:
            message = "the deadline passed"
        case _:
            return None
    return {"code": "server_error", "message": message}


def usage_object(usage: quire.Usage) -> dict[str, Any]:
    """Counts of tokens, as an object has them."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
