"""Limits of the queue, for all tenants together and for each: requests, prompt tokens and waiting time.

Requests on their way in count as waiting: the queue does not know them yet.
"""

from collections import Counter
from dataclasses import dataclass
from math import inf

from quire.errors import OverloadedError
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.live_request import LiveRequest
from scheduler_svc.requests.live.paused_requests import PausedRequests

MIN_RETRY_S = 0.1
MAX_RETRY_S = 60.0
_PAUSED_RETRY_S = 5.0  # when a client resumes is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Limits of what may wait, be paused, or be open in a session. A share is one tenant's part of a limit."""

    max_queue_requests: int
    max_queue_tokens: int
    max_queue_wait_s: float = inf
    max_queue_share: float = 1.0
    max_paused_requests: int = 1000
    max_paused_tokens: int = 4_000_000
    max_paused_share: float = 1.0
    max_requests_per_session: int = 10_000


class QueueLimits:
    """Counts requests on their way in, and refuses those above the limits. Raises OverloadedError alone."""

    def __init__(self, engine: Engine, limits: AdmissionLimits) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._limits = limits
        self._num_entering: Counter[str] = Counter()  # requests by tenant
        self._entering_tokens: Counter[str] = Counter()

    def enter(self, tenant: str, num_tokens: int = 0) -> None:
        """Count a request on its way in; or, with `num_tokens`, the tokens of its prompt."""
        if num_tokens:
            self._entering_tokens[tenant] += num_tokens
        else:
            self._num_entering[tenant] += 1

    def leave(self, tenant: str, num_tokens: int) -> None:
        """Stop counting a request, admitted or refused. `num_tokens`: as given to `enter`, 0 if they never were."""
        for counter, number in ((self._num_entering, 1), (self._entering_tokens, num_tokens)):
            counter[tenant] -= number
            if not counter[tenant]:
                del counter[tenant]

    def check_newcomer(self, tenant: str, priority: int, deadline_s: float | None) -> None:
        """Raise if too many requests wait, or if one more would wait too long."""
        num_entering = self._num_entering.total()
        num_requests = self._scheduler.waiting.num_groups + num_entering
        limits = self._limits
        if num_requests >= limits.max_queue_requests:
            raise self._refusal(f"the queue is full: {num_requests} requests wait", num_requests)
        num_mine = self._scheduler.waiting.size_of(tenant)[0] + self._num_entering[tenant]
        most = limits.max_queue_requests * limits.max_queue_share
        if num_mine >= max(1, most):
            raise self._refusal(f"{num_mine} requests of this tenant wait, which is its share of the queue", num_mine)
        num_ahead = self._scheduler.waiting.num_ahead(priority, deadline_s) + num_entering
        wait_s = self._engine.waits.expected_s(num_ahead)
        if wait_s > limits.max_queue_wait_s:
            raise self._refusal(
                f"this request would wait some {wait_s:.1f} s for a worker, behind {num_ahead} that wait", num_ahead
            )

    def check_tokens(self, tenant: str, num_tokens: int) -> None:
        """Raise if too many prompt tokens wait. A prompt that waits alone may have any length."""
        num_groups, queued = self._scheduler.waiting.size()
        queued += self._entering_tokens.total()
        limits = self._limits
        if queued and queued + num_tokens > limits.max_queue_tokens:
            raise self._refusal(f"the queue is full: {queued} prompt tokens wait", num_groups)
        num_mine, mine = self._scheduler.waiting.size_of(tenant)
        mine += self._entering_tokens[tenant]
        if mine and mine + num_tokens > limits.max_queue_tokens * limits.max_queue_share:
            what = f"{mine} prompt tokens of this tenant wait, and more would be beyond its share of the queue"
            raise self._refusal(what, num_mine)

    def _refusal(self, fault: str, num_ahead: int) -> OverloadedError:
        wait_s = self._engine.waits.expected_s(num_ahead)
        retry_after_s = min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S) if wait_s else 1.0
        return OverloadedError(f"{fault}; come back later", retry_after_s)


def check_pause(request: LiveRequest, paused: PausedRequests, limits: AdmissionLimits) -> None:
    """Raise OverloadedError if one more paused request is above the limits of all tenants or of its own."""
    if request in paused:
        return
    num_tokens = request.num_tokens
    for (num_requests, tokens), share, whose in (
        (paused.size(), 1.0, ""),
        (paused.size_of(request.params.tenant), limits.max_paused_share, " of this tenant"),
    ):
        is_full = num_requests >= max(1, limits.max_paused_requests * share)
        is_long = num_requests and tokens + num_tokens > limits.max_paused_tokens * share
        if is_full or is_long:
            what = f"{num_requests} requests{whose} with {tokens} tokens are paused, and there is no room for more"
            raise OverloadedError(f"{what}: resume or cancel some, or come back later", _PAUSED_RETRY_S)
