"""Orca as the paper built it for comparison: iterations over whole requests, memory reserved for each in one range.

A request is admitted when the allocator has a range for all that it may need, first come first served; it computes its
prompt in one iteration and is never preempted. Nothing is shared: each sample has a range of its own. The batch only
changes when a request comes or ends, so the iterations in between are counted at once.
"""

import math
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from benchmarks.lengths import MAX_MODEL_LEN
from benchmarks.paper.buddy_allocator import BuddyAllocator
from benchmarks.paper.cost_model import CostModel
from benchmarks.paper.outcome import Outcome
from benchmarks.paper.published import System
from benchmarks.paper.trace import Request, Trace

Reservation = Callable[[Request], int]


def reserve_max(request: Request) -> int:
    """Reserve the model's whole context."""
    return MAX_MODEL_LEN


def reserve_pow2(request: Request) -> int:
    """Reserve the output rounded up to a power of two: it is known to within a factor of 2."""
    return min(MAX_MODEL_LEN, request.num_input + (1 << (request.num_output - 1).bit_length()))


def reserve_oracle(request: Request) -> int:
    """Reserve the slots that will be used, as if the output's length were known."""
    return request.num_input + request.num_output


RESERVATIONS: dict[System, Reservation] = {"max": reserve_max, "pow2": reserve_pow2, "oracle": reserve_oracle}


class Orca:
    """One GPU's worth of requests; time is virtual."""

    def __init__(self, num_slots: int, reservation: Reservation, costs: CostModel) -> None:
        self._allocator = BuddyAllocator(num_slots)
        self._reservation = reservation
        self._costs = costs
        self._running: list[tuple[int, int, Request, list[int]]] = []  # heap: last iteration, tie-break, its ranges
        self._iteration = 0
        self._num_filled = 0  # slots with a token, of all that run
        self._num_needed = 0  # slots that will have one at the end
        self._num_kept = 0  # slots asked of the allocator

    def serve(self, trace: Trace) -> Outcome:
        """Serve all requests of the trace, from the first arrival to the last token."""
        outcome = Outcome()
        coming = deque(trace.requests)
        waiting: deque[Request] = deque()
        now_s = 0.0
        while coming or waiting or self._running:
            while coming and coming[0].arrival_s <= now_s:
                waiting.append(coming.popleft())
            num_prompt_tokens = self._admit(waiting, trace.width)
            if not self._running:
                assert coming, "a request needs more than all of the memory"
                now_s = coming[0].arrival_s
                continue
            num_requests = len(self._running)
            step_s = self._costs.of(num_requests * trace.width, 0)
            num_iterations = 1
            if not num_prompt_tokens:
                num_iterations = self._running[0][0] - self._iteration
                if coming and not waiting:
                    until_arrival = math.ceil((coming[0].arrival_s - now_s) / step_s)
                    num_iterations = min(num_iterations, max(1, until_arrival))
            if now_s < trace.duration_s:
                self._count(outcome, num_requests, num_iterations, trace.width)
            self._num_filled += num_iterations * num_requests * trace.width
            self._iteration += num_iterations
            now_s += num_iterations * step_s + num_prompt_tokens * self._costs.prompt_token_s
            self._end_finished(outcome, now_s, trace.width)
        return outcome

    def _admit(self, waiting: deque[Request], width: int) -> int:
        """Admit the queue's head while there is room for all of its samples; return the tokens of the prompts."""
        num_prompt_tokens = 0
        while waiting:
            request = waiting[0]
            size = self._reservation(request)
            ranges: list[int] = []
            while len(ranges) < width and (address := self._allocator.allocate(size)) is not None:
                ranges.append(address)
            if len(ranges) < width:
                for address in ranges:
                    self._allocator.free(address)
                break
            waiting.popleft()
            last = self._iteration + request.num_output
            heappush(self._running, (last, ranges[0], request, ranges))
            num_prompt_tokens += width * request.num_input
            self._num_filled += width * request.num_input
            self._num_needed += width * (request.num_input + request.num_output)
            self._num_kept += width * size
        return num_prompt_tokens

    def _count(self, outcome: Outcome, num_requests: int, num_iterations: int, width: int) -> None:
        """Count the memory of iterations as it is during their execution."""
        outcome.num_steps += num_iterations
        outcome.num_batched += num_iterations * num_requests
        memory, num_growing = outcome.memory, num_requests * width
        num_filled = num_iterations * self._num_filled + num_growing * num_iterations * (num_iterations - 1) // 2
        memory.pool += num_iterations * self._allocator.num_slots
        memory.filled += num_filled
        memory.reserved += num_iterations * self._num_needed - num_filled
        memory.fragmented += num_iterations * (self._num_kept - self._num_needed)

    def _end_finished(self, outcome: Outcome, now_s: float, width: int) -> None:
        while self._running and self._running[0][0] == self._iteration:
            _, _, request, ranges = heappop(self._running)
            for address in ranges:
                self._allocator.free(address)
            num_tokens = width * (request.num_input + request.num_output)
            self._num_filled -= num_tokens
            self._num_needed -= num_tokens
            self._num_kept -= width * self._reservation(request)
            outcome.end(now_s - request.arrival_s, request.num_output)
