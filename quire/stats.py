"""What the scheduler says of itself at a moment: workers, blocks, queue, journal. Knows no wire."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStats:
    """The use of a KV pool, in blocks and in token slots. free + cached + used = total."""

    total: int = 0
    used: int = 0
    cached: int = 0
    free: int = 0
    block_size: int = 0
    filled_slots: int = 0
    wasted_slots: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0

    @property
    def total_slots(self) -> int:
        """Tokens for which there is room."""
        return self.total * self.block_size

    @property
    def waste(self) -> float | None:
        """Part of the allocated token slots that holds no token; None if none is allocated."""
        allocated = self.filled_slots + self.wasted_slots
        return self.wasted_slots / allocated if allocated else None

    @property
    def prefix_hit_rate(self) -> float | None:
        """Part of the tokens looked up in the prefix cache that was found; None before the first lookup."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else None

    def __add__(self, other: "BlockStats") -> "BlockStats":
        return BlockStats(
            total=self.total + other.total,
            used=self.used + other.used,
            cached=self.cached + other.cached,
            free=self.free + other.free,
            block_size=self.block_size or other.block_size,
            filled_slots=self.filled_slots + other.filled_slots,
            wasted_slots=self.wasted_slots + other.wasted_slots,
            prefix_query_tokens=self.prefix_query_tokens + other.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens + other.prefix_hit_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker as the scheduler sees it; times are moving averages."""

    worker_id: str
    address: str
    num_running: int
    blocks: BlockStats
    num_steps: int
    step_s: float
    overhead_s: float
    num_preemptions: int
    recomputed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStats:
    """The state of the journal."""

    store: str  # "redis", or "memory", which is not durable
    entries: int
    pending: int
    write_s: float
    degraded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A snapshot of the scheduler; counts are since its start."""

    workers: tuple[WorkerStats, ...]
    num_waiting: int
    num_running: int
    num_admitted: int
    num_finished: int
    num_refused: int
    prompt_tokens: int
    output_tokens: int
    uptime_s: float
    epoch: int
    journal: JournalStats

    @property
    def blocks(self) -> BlockStats:
        """The pools of all workers together."""
        return sum((worker.blocks for worker in self.workers), BlockStats())
