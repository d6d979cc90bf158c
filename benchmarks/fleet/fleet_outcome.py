"""Outcome of a simulated fleet: tokens over time, times to first token, stalls after a failure, counts of all kinds."""

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.report import percentile

BUCKET_S = 0.25


@dataclass(slots=True)
class FleetOutcome:
    """Sums and lists, in virtual seconds; complete when the simulation has ended."""

    warm_s: float
    end_s: float
    tokens: Counter[int] = field(default_factory=Counter)  # delivered, by bucket of time
    first_token_s: list[tuple[float, float]] = field(default_factory=list)  # when it came, and after how long
    token_s: list[float] = field(default_factory=list)  # of ended requests: time per token behind the first
    stalls_s: list[float] = field(default_factory=list)  # of requests that a failure hit, until their next token
    num_submitted: int = 0
    num_ended: int = 0
    num_steps: int = 0  # executed, after the warm-up
    num_rows: int = 0  # of those steps
    num_answered_rows: int = 0  # from the start
    num_lost_tokens: int = 0  # KV that was lost with workers and leaders, of live requests
    scheduler_busy_s: float = 0.0  # of all schedulers, after the warm-up
    worker_busy_s: float = 0.0  # likewise
    num_moves: int = 0  # of workers to other shards
    last_move_s: float = 0.0  # when the last one served again
    core_cpu_s: float = 0.0  # really taken by the core and what surrounds it here, for all steps; 0: not measured
    num_killed: int = 0  # requests that ended with an error

    def count_tokens(self, moment_s: float, number: int) -> None:
        """Count tokens that reach clients at a moment."""
        self.tokens[int(moment_s / BUCKET_S)] += number

    def rate(self, from_s: float, to_s: float) -> float:
        """Tokens a second that clients got between two moments, both multiples of a bucket."""
        first, last = round(from_s / BUCKET_S), round(to_s / BUCKET_S)
        return sum(self.tokens[bucket] for bucket in range(first, last)) / (to_s - from_s)

    def first_token(self, percent: float, from_s: float | None = None, to_s: float | None = None) -> float | None:
        """Percentile of the time to first token of those that came between two moments; None: none came."""
        begin_s, end_s = self.warm_s if from_s is None else from_s, self.end_s if to_s is None else to_s
        own = [took_s for came_s, took_s in self.first_token_s if begin_s <= came_s < end_s]
        return percentile(own, percent) if own else None
