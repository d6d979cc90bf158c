"""FasterTransformer behind the paper's dynamic batching: whole batches, one after the other.

When the batch before is done it takes the earliest requests, as many as the memory holds at their longest; the batch
runs until its longest output is complete, and only then are all of them answered.
"""

from collections import deque

from benchmarks.paper.cost_model import CostModel
from benchmarks.paper.outcome import Outcome
from benchmarks.paper.trace import Request, Trace


class FasterTransformer:
    """Time is virtual; prompts of a batch are not padded, finished outputs are computed on."""

    def __init__(self, num_slots: int, longest_request: int, costs: CostModel) -> None:
        self.max_batch = num_slots // longest_request
        self._num_slots = num_slots
        self._longest_request = longest_request
        self._costs = costs

    def serve(self, trace: Trace) -> Outcome:
        """Serve all requests of the trace, from the first arrival to the last answer."""
        outcome = Outcome()
        coming = deque(trace.requests)
        now_s = 0.0
        while coming:
            now_s = max(now_s, coming[0].arrival_s)
            batch: list[Request] = []
            while coming and len(batch) < self.max_batch and coming[0].arrival_s <= now_s:
                batch.append(coming.popleft())
            num_steps = max(request.num_output for request in batch)
            if now_s < trace.duration_s:
                outcome.num_steps += num_steps
                outcome.num_batched += num_steps * len(batch)
            num_prompt_tokens = sum(request.num_input for request in batch)
            now_s += num_steps * self._costs.of(len(batch), 0) + num_prompt_tokens * self._costs.prompt_token_s
            for request in batch:
                outcome.end(now_s - request.arrival_s, request.num_output)
        return outcome
