"""A snapshot of the scheduler: workers, blocks, queue, journal. Knows no wire."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSplit:
    """Use of a KV pool, as parts of its token slots that sum to 1 (the paper's Fig. 2)."""

    token_states: float  # hold the KV of a token
    reservation: float  # for tokens that exist and are yet to be computed
    internal_fragmentation: float  # rest of last blocks
    free: float  # blocks that no sequence or pin holds; includes cached ones, which can be reused at once


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStats:
    """The use of a KV pool, in blocks and in token slots. free + cached + used = total."""

    total: int = 0
    used: int = 0
    cached: int = 0
    free: int = 0
    block_size: int = 0
    filled_slots: int = 0  # of used blocks: hold a token's KV
    fragmented_slots: int = 0  # of used blocks: no token exists for them
    reserved_slots: int = 0  # of used blocks: their tokens are yet to be computed
    pinned: int = 0  # of the used blocks
    shared: int = 0  # of the used blocks: held more than once
    sequence_blocks: int = 0  # of the used blocks: held by sequences
    saved: int = 0  # blocks that sequences would hold in addition if none were shared
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0

    @property
    def total_slots(self) -> int:
        """Capacity in tokens."""
        return self.total * self.block_size

    @property
    def wasted_slots(self) -> int:
        """Allocated token slots that hold no token."""
        return self.fragmented_slots + self.reserved_slots

    @property
    def waste(self) -> float | None:
        """Part of the allocated token slots that holds no token; None if none is allocated."""
        allocated = self.filled_slots + self.wasted_slots
        return self.wasted_slots / allocated if allocated else None

    @property
    def saving(self) -> float | None:
        """Blocks saved by sharing / blocks without sharing, as the paper's Fig. 15 counts; None without sequences."""
        unshared = self.sequence_blocks + self.saved
        return self.saved / unshared if unshared else None

    @property
    def split(self) -> SlotSplit | None:
        """Use of the pool by kind; None without a pool."""
        if not self.total_slots:
            return None
        allocated = self.filled_slots + self.wasted_slots
        return SlotSplit(
            token_states=self.filled_slots / self.total_slots,
            reservation=self.reserved_slots / self.total_slots,
            internal_fragmentation=self.fragmented_slots / self.total_slots,
            free=1 - allocated / self.total_slots,
        )

    @property
    def prefix_hit_rate(self) -> float | None:
        """Part of the tokens looked up in the prefix cache that was found; None before the first lookup."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else None

    def __add__(self, other: "BlockStats") -> "BlockStats":
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return BlockStats(**{**sums, "block_size": self.block_size or other.block_size})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker as the scheduler sees it; times and speeds are moving averages, counts are since its arrival."""

    worker_id: str
    address: str
    num_running: int
    blocks: BlockStats
    num_steps: int
    step_s: float
    overhead_s: float
    num_preemptions: int  # of whole groups
    num_swaps: int  # of them, those that moved the group's blocks to the host
    recomputed_tokens: int  # because of the others
    host_blocks: int  # of the swap pool
    used_host_blocks: int  # of them
    swapped_out_blocks: int
    swapped_in_blocks: int
    copied_blocks: int  # by copy-on-write
    swap_blocks_per_s: float | None  # in one direction; None: not known yet
    prefill_tokens_per_s: float | None  # None: not known yet
    fetched_blocks: int = 0  # from other workers
    fetch_blocks_per_s: float | None = None  # None: not known yet
    draining: bool = False  # gets nothing new
    out_of_service: str = ""  # why it gets no work at all; empty: it does


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStats:
    """The state of the journal."""

    store: str  # "redis", or "memory", which is not durable
    entries: int
    pending: int
    write_s: float
    degraded: bool
    delivery: str = ""  # "durable": output waits for its entry; "relaxed": it does not; empty: an older scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyStats:
    """Latencies of the requests that ended within the last minute, as the scheduler saw them."""

    num_requests: int = 0  # with output; the others do not count
    first_token_p50_s: float | None = None  # from a request's arrival; None: no request counts
    first_token_p99_s: float | None = None
    token_p50_s: float | None = None  # from one token of a sample to the next, mean by request; None: no sample had two
    token_p99_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTotals:
    """Counts over all workers, those that have left included."""

    num_preemptions: int = 0  # of whole groups
    num_swaps: int = 0  # of them, those that moved the group's blocks to the host; the others are recomputed
    recomputed_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    copied_blocks: int = 0  # by copy-on-write
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    fetched_blocks: int = 0  # read from other workers, instead of computed


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCounts:
    """Numbers of requests that ended, by reason."""

    stop: int = 0
    length: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A distribution of values. A value that equals a bound is in its bucket."""

    bounds: tuple[float, ...] = ()  # upper ones, ascending
    counts: tuple[int, ...] = (0,)  # by bucket, and last of the values above all bounds
    sum: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributions:
    """Distributions of requests, steps and journal writes; `inference.proto` says when each counts."""

    first_token_s: Histogram = Histogram()
    token_s: Histogram = Histogram()
    mean_token_s: Histogram = Histogram()
    total_s: Histogram = Histogram()
    queue_s: Histogram = Histogram()
    prefill_s: Histogram = Histogram()
    decode_s: Histogram = Histogram()
    inference_s: Histogram = Histogram()
    prompt_tokens: Histogram = Histogram()
    computed_prompt_tokens: Histogram = Histogram()
    output_tokens: Histogram = Histogram()
    longest_output_tokens: Histogram = Histogram()
    num_samples: Histogram = Histogram()
    max_tokens: Histogram = Histogram()
    step_tokens: Histogram = Histogram()
    step_s: Histogram = Histogram()
    step_overhead_s: Histogram = Histogram()
    journal_write_s: Histogram = Histogram()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A snapshot of the scheduler; counts are since its start."""

    workers: tuple[WorkerStats, ...]
    num_waiting: int
    num_running: int
    num_paused: int
    num_admitted: int
    num_finished: int
    num_refused: int
    prompt_tokens: int
    output_tokens: int
    uptime_s: float
    epoch: int
    journal: JournalStats
    latency: LatencyStats = LatencyStats()
    model_name: str = ""  # empty: no worker has registered yet
    num_swapped: int = 0  # of those that wait: their blocks are in a host pool
    work: WorkTotals = WorkTotals()
    ends: EndCounts = EndCounts()
    distributions: Distributions = Distributions()
    prefix_cache: bool = True

    @property
    def blocks(self) -> BlockStats:
        """The pools of all workers together."""
        return sum((worker.blocks for worker in self.workers), BlockStats())
