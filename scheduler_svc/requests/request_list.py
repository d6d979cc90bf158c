"""ListRequests: requests that have not ended, in the order of their arrival, in pages of bounded size.

Reads the requests of engine, admission and recovery, and changes nothing.
"""

import asyncio
import re
import time

from common.violations import Violations
from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.sequence import SequenceStatus
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.live_request import LiveRequest
from scheduler_svc.requests.recovery.recovery import Waiting

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
_PAGE_TOKEN = re.compile(r"[0-9]{0,19}")  # the number of the last request listed
_SLICE = 100  # requests looked at before the event loop has its turn

FOR_JOURNAL = "the journal"
FOR_ITS_MODEL = "a worker of the model that it was accepted for"


class RequestList:
    """One per process."""

    def __init__(self, engine: Engine, admission: Admission) -> None:
        self._engine = engine
        self._admission = admission

    async def page(self, request: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        """One page. Raises InvalidRequestError."""
        _check(request)
        after = int(request.page_token or 0)
        tenant = request.tenant if request.HasField("tenant") else None
        states = frozenset(request.states)
        page_size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        page = pb.ListRequestsResponse()
        for index, each in enumerate(self._in_order(after, tenant)):
            if index and not index % _SLICE:
                await asyncio.sleep(0)
            summary = self._of_live(each) if isinstance(each, LiveRequest) else _of_waiting(each)
            if summary is None or (states and summary.state not in states):
                continue
            if len(page.requests) == page_size:
                page.next_page_token = str(after)
                break
            page.requests.append(summary)
            after = each.number
        return page

    def waiting_for(self, request_id: str) -> str:
        """Reason why a request waits, for people; empty while it runs, and if it is not live."""
        live = self._engine.live.get(request_id)
        if live is not None:
            return self._reason(live, _state(live))
        return FOR_ITS_MODEL if self._admission.recovery.find(request_id) is not None else ""

    def _in_order(self, after: int, tenant: str | None) -> list[LiveRequest | Waiting]:
        """Requests with a number above `after`, by number."""
        live = [*self._engine.live.values(), *self._admission.entering]
        found: list[LiveRequest | Waiting] = [
            each for each in live if each.number > after and (tenant is None or each.params.tenant == tenant)
        ]
        found += [
            each
            for each in self._admission.recovery.waiting
            if each.number > after and (tenant is None or each.tenant == tenant)
        ]
        return sorted(found, key=lambda each: each.number)

    def _of_live(self, live: LiveRequest) -> pb.RequestSummary | None:
        """Summary of a live request; None if it has ended since it was found."""
        is_entering = live.times.accepted_ns is None
        if is_entering and live not in self._admission.entering:
            return None
        if not is_entering and live.request_id not in self._engine.live:
            return None
        state = pb.LIVE_STATE_ENTERING if is_entering else _state(live)
        return pb.RequestSummary(
            request_id=live.request_id,
            tenant=live.params.tenant,
            state=state,
            prompt_tokens=live.num_prompt_tokens,
            output_tokens=sum(sample.num_released for sample in live.stream.samples),
            num_samples=live.params.num_samples,
            beam_width=live.params.beam.beam_width if live.params.beam is not None else 0,
            priority=live.params.priority,
            age_ms=(time.monotonic_ns() - live.times.arrived_ns) // 1_000_000,
            worker_id=live.group.worker_id or "",
            waiting_for=self._reason(live, state),
        )

    def _reason(self, live: LiveRequest, state: pb.LiveState.ValueType) -> str:
        if state in (pb.LIVE_STATE_ENTERING, pb.LIVE_STATE_ENDING):
            return FOR_JOURNAL
        if state != pb.LIVE_STATE_PAUSED and self._engine.is_journal_behind:
            return FOR_JOURNAL
        if state == pb.LIVE_STATE_RUNNING and self._engine.journal.health.is_degraded:
            return FOR_JOURNAL  # its tokens are computed, and its output waits
        reason = self._engine.scheduler.waiting_reason(live.group)
        return "" if reason is None else reason.value


def _state(live: LiveRequest) -> pb.LiveState.ValueType:
    group = live.group
    if live.ended_state is not None:
        return pb.LIVE_STATE_ENDING
    if group.is_paused:
        return pb.LIVE_STATE_PAUSED
    statuses = {sequence.status for sequence in group.sequences}
    if SequenceStatus.RUNNING in statuses:
        return pb.LIVE_STATE_RUNNING
    if group.swap_step is not None:
        return pb.LIVE_STATE_SWAPPED
    return pb.LIVE_STATE_PREEMPTED if SequenceStatus.PREEMPTED in statuses else pb.LIVE_STATE_QUEUED


def _of_waiting(waiting: Waiting) -> pb.RequestSummary | None:
    """Summary of a request that waits for its model; None if it waits no more."""
    if waiting.gone.is_set():
        return None
    admission, request = waiting.journaled.admission, waiting.journaled.admission.request
    return pb.RequestSummary(
        request_id=waiting.journaled.request_id,
        tenant=waiting.tenant,
        state=pb.LIVE_STATE_ENDING if waiting.has_ended else pb.LIVE_STATE_RECOVERING,
        prompt_tokens=waiting.journaled.num_prompt_tokens,
        num_samples=request.sampling.n or 1,
        beam_width=request.beam.beam_width,
        priority=request.priority,
        age_ms=max(0, time.time_ns() - admission.arrived_unix_ns) // 1_000_000,
        waiting_for=FOR_ITS_MODEL,
    )


def _check(request: pb.ListRequestsRequest) -> None:
    violations = Violations()
    violations.add_each(
        (f"states[{i}]", f"is {state}, which is no LiveState: give 1 to {pb.LIVE_STATE_ENDING}")
        for i, state in enumerate(request.states)
        if state not in pb.LiveState.values() or state == pb.LIVE_STATE_UNSPECIFIED
    )
    if not _PAGE_TOKEN.fullmatch(request.page_token):
        violations.add("page_token", "is not one that this call gave: leave it out for the first page")
    violations.raise_if_any()
