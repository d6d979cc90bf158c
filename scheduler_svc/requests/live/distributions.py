"""Distributions of times, lengths and step sizes since the scheduler's start, for GetStats and metrics.

Observed once for each step, delivery and end, never for each token. Decides nothing.
"""

from collections.abc import Iterable

from common.running_histogram import RunningHistogram, decades
from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.requests.live.end_report import mean_token_ns
from scheduler_svc.requests.live.live_request import LiveRequest

_REQUEST_S = decades((1, 2.5, 5), -3, 3)
_TOKEN_S = decades((1, 1.5, 2, 3, 5, 7.5), -4, 1)
_STEP_S = decades((1, 2.5, 5), -5, 1)
_LENGTHS = decades((1, 2, 5), 0, 6)
_SAMPLES = (1, 2, 5, 10, 20, 50, 100)
_STEP_TOKENS = tuple(2**exponent for exponent in range(15))


class DistributionRecorder:
    """One per engine; its attributes are named as the fields of `Distributions` on the wire."""

    def __init__(self) -> None:
        self.first_token_s = RunningHistogram(_REQUEST_S)
        self.token_s = RunningHistogram(_TOKEN_S)
        self.mean_token_s = RunningHistogram(_TOKEN_S)
        self.total_s = RunningHistogram(_REQUEST_S)
        self.queue_s = RunningHistogram(_REQUEST_S)
        self.prefill_s = RunningHistogram(_REQUEST_S)
        self.decode_s = RunningHistogram(_REQUEST_S)
        self.inference_s = RunningHistogram(_REQUEST_S)
        self.prompt_tokens = RunningHistogram(_LENGTHS)
        self.computed_prompt_tokens = RunningHistogram(_LENGTHS)
        self.output_tokens = RunningHistogram(_LENGTHS)
        self.longest_output_tokens = RunningHistogram(_LENGTHS)
        self.num_samples = RunningHistogram(_SAMPLES)
        self.max_tokens = RunningHistogram(_LENGTHS)
        self.step_tokens = RunningHistogram(_STEP_TOKENS)
        self.step_s = RunningHistogram(_STEP_S)
        self.step_overhead_s = RunningHistogram(_STEP_S)

    def record_step(self, plan: StepPlan, exec_ns: int, overhead_ns: int | None) -> None:
        """Record an executed step; `overhead_ns`: None if the worker had been idle before it."""
        self.step_tokens.observe(sum(plan.num_tokens))
        self.step_s.observe(exec_ns / 1e9)
        if overhead_ns is not None:
            self.step_overhead_s.observe(overhead_ns / 1e9)

    def record_end(self, request: LiveRequest) -> None:
        """Record a request whose end is durable."""
        times = request.times
        moments = (times.arrived_ns, times.first_scheduled_ns, times.first_token_ns, times.seen_end_ns)
        arrived_ns, scheduled_ns, first_token_ns, ended_ns = moments
        if request.has_output and first_token_ns is None:  # an earlier leader began it: its first step is unknown, too
            scheduled_ns = None
        _observe_time(self.total_s, arrived_ns, ended_ns)
        _observe_time(self.queue_s, arrived_ns, scheduled_ns)
        _observe_time(self.prefill_s, scheduled_ns, first_token_ns)
        _observe_time(self.inference_s, scheduled_ns, ended_ns)
        _observe_time(self.decode_s, first_token_ns, ended_ns)
        _observe_time(self.mean_token_s, 0, mean_token_ns(request))
        self._record_lengths(request)

    def _record_lengths(self, request: LiveRequest) -> None:
        usage, lengths = request.usage(), [each.num_released for each in request.stream.samples]
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.computed_prompt_tokens.observe(usage.prompt_tokens - usage.cached_tokens)
        self.output_tokens.observe(sum(lengths))
        self.longest_output_tokens.observe(max(lengths, default=0))
        self.num_samples.observe(request.params.num_samples)
        self.max_tokens.observe(request.max_tokens)


def _observe_time(histogram: RunningHistogram, since_ns: int | None, until_ns: int | None) -> None:
    if since_ns is not None and until_ns is not None:
        histogram.observe(max(0, until_ns - since_ns) / 1e9)


class EndCounter:
    """Numbers of requests that ended, by the fields of `EndCounts` on the wire."""

    def __init__(self) -> None:
        self.stop = self.length = self.cancelled = self.expired = self.failed = 0

    def record_end(self, state: int | None, reasons: Iterable[int]) -> None:
        """Record an end by the request's state, and by the reasons of its samples if it ended by itself."""
        match state:
            case pb.REQUEST_STATE_FINISHED if pb.FINISH_REASON_LENGTH in reasons:
                self.length += 1
            case pb.REQUEST_STATE_FINISHED:
                self.stop += 1
            case pb.REQUEST_STATE_CANCELLED:
                self.cancelled += 1
            case pb.REQUEST_STATE_EXPIRED:
                self.expired += 1
            case _:
                self.failed += 1
