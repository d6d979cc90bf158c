"""A scheduler whose one worker's pool is always full: more requests wait than fit, until none are left.

It steps the real core at depth 1. What executes a step is given to it: nothing at all where lengths alone decide, or
a model. It knows nothing of figures; who measures looks between `start` and `complete`, while a step is executed.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from benchmarks.lengths import MAX_MODEL_LEN, Lengths
from scheduler_svc.core.preemption import PreemptionMode
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.scheduler_stats import WorkerCounters
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan

WORKER = "worker"
BLOCK_SIZE = 16
NUM_BLOCKS = 983  # 15,728 token slots, the paper's pool for OPT-13B: 12 GiB of 800 KiB each
MAX_NUM_SEQS = 1024  # more than ever fit: memory is to be the limit
MAX_BATCHED_TOKENS = 2560


class Execution(Protocol):
    """Stand-in for the worker."""

    def execute(self, plan: StepPlan) -> Seq[int]:
        """Execute a step: one token for each of the plan's sampled sequences."""

    def decide(self, scheduler: Scheduler) -> None:
        """Make the host's choices, once the step's tokens are known."""


class NoModel:
    """Tokens that never repeat, so that nothing is shared but what was forked."""

    def __init__(self) -> None:
        self._tokens = count()

    def execute(self, plan: StepPlan) -> list[int]:
        return [next(self._tokens) for _ in plan.sampled_sequences]

    def decide(self, scheduler: Scheduler) -> None:
        """Do nothing: sampled sequences need no choice by the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The pool, and what happens when it is full."""

    num_blocks: int = NUM_BLOCKS
    block_size: int = BLOCK_SIZE
    max_num_seqs: int = MAX_NUM_SEQS
    preemption: PreemptionMode = "swap"  # as in the paper; the host pool is as large as the device's
    watermark: float = 0.01


class SaturatedPool:
    """Serves `groups` as fast as the pool allows; the queue holds as many as could start in one step."""

    def __init__(self, config: PoolConfig, groups: Iterable[SequenceGroup], execution: Execution) -> None:
        self.groups: list[SequenceGroup] = []  # unfinished, waiting ones included
        self.is_saturated = True  # whether there are always more to come
        self._groups = iter(groups)
        self._execution = execution
        self._max_waiting = min(64, config.num_blocks)
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
                max_num_seqs=config.max_num_seqs,
                watermark=config.watermark,
                pipeline_depth=1,
                enable_prefix_cache=False,  # the traces have lengths and no text: nothing is there twice
                preemption=config.preemption,
            )
        )
        self._scheduler.workers.add_worker(
            WORKER,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_seats=config.max_num_seqs,
            num_host_blocks=config.num_blocks if config.preemption != "recompute" else 0,
        )

    def start(self) -> StepPlan | None:
        """Plan a step and allocate its blocks. None when everything is done."""
        while self.is_saturated and self._num_waiting_groups() < self._max_waiting:
            group = next(self._groups, None)
            if group is None:
                self.is_saturated = False
            else:
                self._scheduler.add(group)
                self.groups.append(group)
        if not self.groups:
            return None
        plan = self._scheduler.schedule(WORKER)
        assert plan is not None, "requests are unfinished, and nothing can run"
        return plan

    def complete(self, plan: StepPlan) -> None:
        """Execute the step; finished sequences free their blocks."""
        tokens = self._execution.execute(plan)
        for sequence, _ in self._scheduler.apply(WORKER, plan.step_id, tokens):
            if sequence.num_output_tokens == sequence.max_tokens:
                self._scheduler.finish(sequence)
        self._execution.decide(self._scheduler)
        self.groups = [group for group in self.groups if not group.is_finished]

    def stats(self) -> WorkerCounters:
        (stats,) = self._scheduler.stats().workers
        return stats

    def check(self) -> None:
        """Assert the scheduler's invariants."""
        self._scheduler.check()

    def _num_waiting_groups(self) -> int:
        return sum(1 for group in self.groups if group.worker_id is None)


def sampled_groups(lengths: Iterable[Lengths], num_sequences: int) -> Iterator[SequenceGroup]:
    """Make a request of `num_sequences` samples for each; all its samples have its output length."""
    seq_ids = count()
    for arrival, each in enumerate(lengths):
        prompt = [0] * each.num_input
        yield SequenceGroup(
            [new_sequence(next(seq_ids), prompt, each.num_output) for _ in range(num_sequences)], arrival=arrival
        )


def new_sequence(seq_id: int, prompt: list[int], num_output: int) -> Sequence:
    """Make a sequence that ends after exactly `num_output` tokens, as the paper's did."""
    assert len(prompt) + num_output <= MAX_MODEL_LEN
    return Sequence(
        seq_id=seq_id,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        max_tokens=num_output,
        stop_token_ids=frozenset(),
    )
