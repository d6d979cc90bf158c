"""Log line of a request that has ended: its durations, token counts, memory and reason."""

import structlog

from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.live.live_request import LiveRequest

log = structlog.get_logger()


def first_token_ns(request: LiveRequest) -> int | None:
    """Time from arrival to first token; None without output."""
    times = request.times
    return None if times.first_token_ns is None else times.first_token_ns - times.arrived_ns


def mean_token_ns(request: LiveRequest) -> int | None:
    """Mean time between tokens of the longest sample; None if no sample had a second token."""
    times = request.times
    num_intervals = max((sample.num_released for sample in request.stream.samples), default=0) - 1
    if times.first_token_ns is None or times.seen_end_ns is None or num_intervals < 1:
        return None
    return max(0, times.seen_end_ns - times.first_token_ns) // num_intervals


def report_end(request: LiveRequest) -> None:
    """Write the line `request ended`. Fields that are unknown or zero are left out."""
    usage, times = request.usage(), request.times
    queued_ns = None if times.first_scheduled_ns is None else times.first_scheduled_ns - times.arrived_ns
    reasons = dict.fromkeys(
        pb.FinishReason.Name(sample.finish.reason).removeprefix("FINISH_REASON_").lower()
        for sample in request.samples
        if sample.finish is not None
    )
    fields = {
        "tenant": request.params.tenant or None,
        "reason": ",".join(reasons) or None,
        "worker": request.last_worker_id,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens or None,
        "output_tokens": usage.completion_tokens,
        "queue_ms": _milliseconds(queued_ns),
        "first_token_ms": _milliseconds(first_token_ns(request)),
        "token_ms": _milliseconds(mean_token_ns(request)),
        "total_ms": _milliseconds(None if times.seen_end_ns is None else times.seen_end_ns - times.arrived_ns),
        **{field.name: value for field, value in request.memory().ListFields()},
        "error": request.error or None,
    }
    log.info(
        "request ended",
        request_id=request.request_id,
        state=pb.RequestState.Name(request.ended_state or pb.REQUEST_STATE_UNSPECIFIED),
        **{name: value for name, value in fields.items() if value is not None},
    )


def _milliseconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else round(nanoseconds / 1e6, 3)
