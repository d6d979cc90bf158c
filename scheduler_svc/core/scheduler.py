"""The scheduler: who computes what in the next step of a worker, and what its results mean for the sequences.

One rule: `num_computed_tokens` chases `num_tokens`. First come, first served within a priority, one waiting queue
for all workers, chunked prefill under a token budget, preemption by recomputation.
Pure: it knows nothing of the wire, clocks, requests or stop conditions; those come in as calls.
"""

from collections.abc import Collection
from dataclasses import dataclass

from scheduler_svc.core import placement
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.scheduler_stats import SchedulerStats
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.step_rows import add_row, add_running_rows, force_preemption
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import PlannedStep, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits are per worker."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    watermark: float = 0.01  # part of the pool that admissions leave available
    pipeline_depth: int = 2
    enable_prefix_cache: bool = True
    preempt_every: int | None = None  # for tests: force a preemption before every nth step of a worker

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "pipeline_depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}: give a part of the pool, 0 or more and less than 1")
        if self.preempt_every is not None and self.preempt_every < 1:
            raise ValueError(f"preempt_every is {self.preempt_every}: give at least 1, or None")


class Scheduler:
    """All sequences and all workers. Every call leaves a state in which `check()` holds.

    After any call that changes something, every worker with `has_work()` should be asked to `schedule()`:
    one worker may leave the head of the queue to another.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._limits = WorkerLimits(max_num_seqs=config.max_num_seqs, pipeline_depth=config.pipeline_depth)
        self._workers: dict[str, WorkerState] = {}
        self._waiting = WaitingQueue()
        self._stranded: dict[int, Sequence] = {}  # no present worker could ever hold them; they wait for one

    def add_worker(
        self,
        worker_id: str,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        """`max_num_batched_tokens`: the most it can compute in a step, if that is a limit.

        Raises ValueError for an id in use, and for a block size other than that of the present workers.
        """
        if worker_id in self._workers:
            raise ValueError(f"worker {worker_id} is here already: remove it first")
        if num_slots < 1 or block_size < 1:
            raise ValueError(f"worker {worker_id} has {num_slots} slots, block size {block_size}: both are >= 1")
        for other in self._workers.values():
            if other.block_size != block_size:
                raise ValueError(
                    f"worker {worker_id} has block size {block_size}, worker {other.worker_id} has "
                    f"{other.block_size}: start all workers with the same"
                )
        max_num_batched_tokens = min(
            self._config.max_num_batched_tokens, max_num_batched_tokens or self._config.max_num_batched_tokens
        )
        self._workers[worker_id] = WorkerState(
            worker_id,
            max_num_batched_tokens=max_num_batched_tokens,
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            num_watermark_blocks=int(num_blocks * self._config.watermark),
            enable_prefix_cache=self._config.enable_prefix_cache,
        )
        for sequence in self._stranded.values():
            self._waiting.push(sequence)
        self._stranded.clear()
        if len(self._workers) == 1:
            for sequence in self._waiting:
                sequence.block_hashes.clear()  # they may be of another block size

    def remove_worker(self, worker_id: str) -> list[Sequence]:
        """It is gone, with the KV and the tokens in flight. Returns what ran there; it waits again."""
        worker = self._workers.pop(worker_id)
        for step in worker.in_flight:
            for row in step.plan.sampled_rows:
                step.plan.sequences[row].num_pending_tokens = 0
        for sequence in worker.running:
            sequence.slot = None
            sequence.block_table = []
            sequence.num_offered_blocks = 0
            sequence.lose_computed_tokens()
        for sequence in [*worker.running, *worker.parked.values()]:
            self._wait(sequence)
        return worker.running

    def add(self, sequence: Sequence) -> None:
        """It waits for a worker. Tokens beyond its prompt are output of an earlier life, and are kept."""
        if sequence.status is not SequenceStatus.WAITING or sequence in self._waiting:
            raise ValueError(f"sequence {sequence.seq_id} was added before")
        if sequence.has_all_tokens:
            raise ValueError(f"sequence {sequence.seq_id} has its {sequence.max_tokens} tokens already")
        self._waiting.push(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Finished or cancelled, in whatever state; again is harmless.

        Blocks and slot are free at once, or when the last step in flight that uses them is done.
        """
        if sequence.status is SequenceStatus.RUNNING:
            assert sequence.worker_id is not None
            self._workers[sequence.worker_id].stop(sequence)
        elif sequence.status is not SequenceStatus.FINISHED:
            self._waiting.discard(sequence)
            self._stranded.pop(sequence.seq_id, None)
            if sequence.worker_id is not None:
                self._workers[sequence.worker_id].parked.pop(sequence.seq_id)
        sequence.status = SequenceStatus.FINISHED
        sequence.worker_id = None

    def schedule(self, worker_id: str) -> StepPlan | None:
        """The next step of a worker. None: nothing to do now, or its pipeline is full."""
        worker = self._workers[worker_id]
        if len(worker.in_flight) >= self._config.pipeline_depth:
            return None
        if worker.needs_snapshot and worker.in_flight:
            return None  # a snapshot says every slot's next token: all must be known
        worker.offer_filled_blocks()
        plan = StepPlan(worker_id, worker.next_step_id, worker.needs_snapshot)
        step = PlannedStep(plan)
        if self._config.preempt_every and plan.step_id % self._config.preempt_every == 0:
            force_preemption(worker, step)
        budget = add_running_rows(worker, step, worker.max_num_batched_tokens)
        for sequence in step.preempted:
            if not sequence.num_pending_tokens:
                self._wait(sequence)
        # What was preempted does not come back in the same breath, unless there is nothing else to do.
        if not (step.preempted and plan.sequences):
            self._admit(worker, step, budget)
        if not plan.sequences:
            return None
        if not plan.snapshot:
            plan.freed_slots = worker.freed_slots
        else:
            plan.whole = list(worker.running)
            plan.append_pairs = []
        worker.freed_slots = []
        worker.needs_snapshot = False
        worker.next_step_id += 1
        worker.in_flight.append(step)
        return plan

    def offer_filled_blocks(self, worker_id: str) -> None:
        """Bring the prefix cache up to date: best while a step is executed; else the next `schedule` does it."""
        self._workers[worker_id].offer_filled_blocks()

    def apply(self, worker_id: str, step_id: int, token_ids: Collection[int]) -> list[tuple[Sequence, int]]:
        """Take the result of the oldest step in flight; `token_ids` stand beside its `sampled_rows`.

        Returns each sequence that got a token, with the token. The caller decides what ends with it, and calls
        `finish`. Raises ValueError, and changes nothing, if the result is not that of the oldest step.
        """
        worker = self._workers[worker_id]
        plan = worker.in_flight[0].plan if worker.in_flight else None
        if plan is None or plan.step_id != step_id:
            raise ValueError(f"worker {worker_id}: result of step {step_id} out of turn")
        if len(token_ids) != len(plan.sampled_rows):
            num_samples = len(plan.sampled_rows)
            raise ValueError(f"worker {worker_id}: {len(token_ids)} tokens for {num_samples} samples")
        appended = []
        sequences = plan.sequences
        running, finished = SequenceStatus.RUNNING, SequenceStatus.FINISHED  # looking them up is slow
        for row, token_id in zip(plan.sampled_rows, token_ids, strict=True):
            sequence = sequences[row]
            sequence.num_pending_tokens -= 1
            if sequence.status is finished:
                continue
            sequence.token_ids.append(token_id)
            appended.append((sequence, token_id))
            if sequence.status is not running and sequence.num_pending_tokens == 0:
                self._wait(worker.parked.pop(sequence.seq_id))
        worker.complete_step()
        return appended

    def rollback(self, worker_id: str) -> None:
        """No step in flight on this worker was executed: take them back. The next plan is a snapshot."""
        worker = self._workers[worker_id]
        for sequence in worker.undo_steps():
            self._wait(sequence)
            if not sequence.num_preemptions and not sequence.num_output_tokens:
                sequence.status = SequenceStatus.WAITING  # it never ran
        for sequence in worker.parked.values():
            self._wait(sequence)
        worker.parked.clear()

    def request_snapshot(self, worker_id: str) -> None:
        """The next plan is a snapshot. It is made once no step is in flight."""
        self._workers[worker_id].needs_snapshot = True

    def has_work(self, worker_id: str) -> bool:
        """Whether something runs or is in flight there, or waits in the shared queue."""
        worker = self._workers[worker_id]
        return bool(worker.running or worker.in_flight or self._waiting)

    def queue_size(self) -> tuple[int, int]:
        """Sequences in the queue, and their tokens."""
        num_stranded_tokens = sum(sequence.num_tokens for sequence in self._stranded.values())
        return len(self._waiting) + len(self._stranded), self._waiting.num_tokens + num_stranded_tokens

    def max_tokens_that_fit(self) -> int:
        """Tokens (prompt and output) of the longest sequence that every present worker could hold alone."""
        return min((worker.capacity_tokens for worker in self._workers.values()), default=0)

    def stats(self) -> SchedulerStats:
        num_parked = sum(len(worker.parked) for worker in self._workers.values())
        return SchedulerStats(
            num_waiting=len(self._waiting) + len(self._stranded) + num_parked,
            workers=tuple(worker.stats() for worker in self._workers.values()),
        )

    def check(self) -> None:
        """Assert the invariants of every worker and of the queue."""
        for worker in self._workers.values():
            worker.check()
            assert len(worker.in_flight) <= self._config.pipeline_depth
            assert len(worker.running) <= self._config.max_num_seqs
        waiting = [*self._waiting, *self._stranded.values()]
        assert len(waiting) == len(self._waiting) + len(self._stranded)
        for sequence in waiting:
            assert sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            assert sequence.worker_id is None and sequence.slot is None and not sequence.block_table
            assert sequence.num_computed_tokens == sequence.num_pending_tokens == 0

    def _wait(self, sequence: Sequence) -> None:
        """Into the queue again, at the place of its arrival."""
        sequence.status = SequenceStatus.PREEMPTED
        sequence.worker_id = None
        self._waiting.push(sequence)

    def _admit(self, worker: WorkerState, step: PlannedStep, budget: int) -> None:
        """Start waiting sequences in order; the first that cannot be started here and now ends it."""
        while budget > 0 and placement.has_free_slot(worker, self._limits):
            sequence = self._head()
            if sequence is None or sequence.has_all_tokens:
                return
            # A worker that has preempted itself idle leaves nothing to others: they may not be asked again.
            others = () if step.preempted else self._workers.values()
            is_busy = bool(step.plan.sequences)
            prefix = placement.claim(sequence, worker, others, self._limits, is_busy=is_busy)
            if prefix is None:
                return
            self._waiting.pop()
            worker.start(sequence, prefix, step.plan.step_id)
            _count_prefix(worker, sequence)
            num_new = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            step.plan.whole.append(sequence)
            add_row(worker, step, sequence, num_new, sequence.num_tokens)
            budget -= num_new

    def _head(self) -> Sequence | None:
        """The first in the queue that a present worker could hold; those that none could step aside."""
        while (sequence := self._waiting.peek()) is not None:
            if any(placement.can_ever_hold(worker, sequence) for worker in self._workers.values()):
                return sequence
            self._stranded[sequence.seq_id] = self._waiting.pop()
        return None


def _count_prefix(worker: WorkerState, sequence: Sequence) -> None:
    """A sequence that has just been started: what the cache gave, what is computed a second time."""
    num_hit = sequence.num_computed_tokens
    if worker.enable_prefix_cache and sequence.use_prefix_cache and not sequence.num_preemptions:
        worker.num_prefix_query_tokens += sequence.num_tokens
        worker.num_prefix_hit_tokens += num_hit
        sequence.num_cached_tokens = num_hit
    worker.num_recomputed_tokens += max(0, sequence.num_lost_tokens - num_hit)
    sequence.num_lost_tokens = 0
