"""Requests of a fleet's clients: lengths as in the paper's ShareGPT trace, half of them behind a common prefix."""

from dataclasses import dataclass
from random import Random

from benchmarks.fleet.fleet_config import FleetConfig
from benchmarks.paper.trace import Draw, paper_lengths
from scheduler_svc.core.sequence import Sequence

NUM_PREFIXES = 512
PREFIX_TOKENS = 128
PREFIX_SHARE = 0.5  # of the requests
LENGTHS_AT_ONCE = 500


@dataclass(slots=True, eq=False)
class FleetRequest:
    """Request, from its client's side. `sequence`: of the present leader; None: not admitted yet."""

    client: int
    prompt: list[int]
    num_output: int
    submitted_s: float
    shard: int = 0
    first_s: float | None = None  # moment of the first token
    sequence: Sequence | None = None


class RequestSource:
    """Source of requests, the same for the same seed."""

    def __init__(self, config: FleetConfig) -> None:
        self._random = Random(config.seed)
        self._fixed = config.fixed_lengths
        self._draw: Draw = paper_lengths("sharegpt", config.seed)
        self._lengths: list[tuple[int, int]] = []
        self._num_made = 0

    def make(self, client: int, now_s: float, *, is_first: bool) -> FleetRequest:
        """Make the next request of a client. Its first one is under way already: only a part of its output is left."""
        num_input, num_output = self._fixed or self._next_lengths()
        if is_first and self._fixed is None:
            num_output = max(1, round(num_output * self._random.random()))
        self._num_made += 1
        prefix = [-self._random.randrange(NUM_PREFIXES) - 1] * PREFIX_TOKENS
        has_prefix = self._fixed is None and self._random.random() < PREFIX_SHARE
        prompt = [*(prefix if has_prefix else ()), *[self._num_made] * num_input]
        return FleetRequest(client=client, prompt=prompt, num_output=num_output, submitted_s=now_s)

    def _next_lengths(self) -> tuple[int, int]:
        if not self._lengths:
            self._lengths = [(each.num_input, each.num_output) for each in self._draw(LENGTHS_AT_ONCE)]
        return self._lengths.pop()
