"""The scheduler's settings, checked when they are made."""

from dataclasses import dataclass
from typing import get_args

from scheduler_svc.core.fetch_costs import FetchMode
from scheduler_svc.core.ordering import OrderPolicy
from scheduler_svc.core.preemption import PreemptionMode


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of the scheduler. Limits are per worker."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    watermark: float = 0.01  # part of the pool that admissions leave available
    pipeline_depth: int = 2
    enable_prefix_cache: bool = True
    order: OrderPolicy = "fcfs"  # within a priority
    priority_patience_s: float = 30.0  # how long a better priority class may keep a group waiting: see `aging`
    preemption: PreemptionMode = "auto"  # what happens to the blocks of a preempted group
    block_fetch: FetchMode = "auto"  # whether a group's blocks are fetched from another worker, or computed
    preempt_every: int | None = None  # for tests: force a preemption before every nth step of a worker

    @property
    def num_spare_positions(self) -> int:
        """Positions of a sequence's blocks that forced tokens leave free: for steps planned without knowing of them."""
        return self.pipeline_depth - 1

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "pipeline_depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")
        if not self.priority_patience_s > 0:
            raise ValueError(f"priority_patience_s is {self.priority_patience_s}: give seconds, more than 0")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}: give a part of the pool, 0 or more and less than 1")
        for name, kind in (("order", OrderPolicy), ("preemption", PreemptionMode), ("block_fetch", FetchMode)):
            choices = get_args(kind)
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}: give one of {', '.join(choices)}")
        if self.preempt_every is not None and self.preempt_every < 1:
            raise ValueError(f"preempt_every is {self.preempt_every}: give at least 1, or None")
