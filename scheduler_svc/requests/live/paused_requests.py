"""Paused requests, counted by tenant with the tokens that they had when they were paused."""

from collections import Counter

from scheduler_svc.requests.live.live_request import LiveRequest


class PausedRequests:
    """A set of requests. Adding one that is there, or dropping one that is not, is harmless."""

    def __init__(self) -> None:
        self._num_tokens: dict[LiveRequest, int] = {}
        self._num_requests_of: Counter[str] = Counter()
        self._num_tokens_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._num_tokens)

    def __contains__(self, request: LiveRequest) -> bool:
        return request in self._num_tokens

    def size(self) -> tuple[int, int]:
        """Number of requests, and of their tokens."""
        return len(self._num_tokens), self._num_tokens_of.total()

    def size_of(self, tenant: str) -> tuple[int, int]:
        return self._num_requests_of[tenant], self._num_tokens_of[tenant]

    def add(self, request: LiveRequest) -> None:
        if request not in self._num_tokens:
            self._num_tokens[request] = num_tokens = request.num_tokens
            self._change(request.params.tenant, 1, num_tokens)

    def discard(self, request: LiveRequest) -> None:
        if request in self._num_tokens:
            self._change(request.params.tenant, -1, -self._num_tokens.pop(request))

    def _change(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        for counter, number in ((self._num_requests_of, num_requests), (self._num_tokens_of, num_tokens)):
            counter[tenant] += number
            if not counter[tenant]:
                del counter[tenant]
