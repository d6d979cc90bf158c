"""A listing of requests that have not ended, as plain frozen data."""

from dataclasses import dataclass
from enum import Enum


class LiveState(Enum):
    """State of a request that has not ended."""

    ENTERING = "entering"  # not accepted until the journal has it
    QUEUED = "queued"  # has not run yet
    RUNNING = "running"
    PREEMPTED = "preempted"  # it ran, was preempted, and is computed again later
    SWAPPED = "swapped"  # it ran, was preempted, and its KV is in its worker's host pool
    PAUSED = "paused"
    RECOVERING = "recovering"  # accepted by an earlier scheduler, not resumed yet
    ENDING = "ending"  # its end is not reported until the journal has it


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """One request that has not ended."""

    request_id: str
    tenant: str
    state: LiveState
    prompt_tokens: int
    output_tokens: int  # that its readers may have, of all samples together
    num_samples: int  # that will come back, `n`
    beam_width: int | None  # None: its samples are drawn
    priority: int  # lower is served first
    age_s: float  # since its arrival
    worker_id: str | None  # worker that it runs on, or that has its KV
    waiting_for: str | None  # in words for people, which may change; None: it runs


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPage:
    """Requests in the order of their arrival."""

    requests: tuple[RequestSummary, ...]
    next_page_token: str | None  # asks for the next page; None: this is the last one
