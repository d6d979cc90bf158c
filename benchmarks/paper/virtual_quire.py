"""Quire's own scheduler and block manager, in virtual time: each step takes what the cost model says.

Nothing of the core is replaced; only its worker is. Lengths decide when a sequence ends, and its tokens are its own
number, so that nothing is shared but what is forked or begins with the same prefix.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from benchmarks.paper.cost_model import CostModel
from benchmarks.paper.outcome import Outcome
from benchmarks.paper.trace import Request, Trace
from scheduler_svc.core.preemption import PreemptionMode
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan

WORKER = "worker"
# The limits of the paper's release; the memory is to be the limit, and the budget large.
MAX_BATCHED_TOKENS = 2560
MAX_NUM_SEQS = 256
WATERMARK = 0.01
STEPS_A_LOOK = 16  # at the memory: to look costs as much as a step


@dataclass(frozen=True, slots=True, kw_only=True)
class QuireConfig:
    """The pool, and what happens when it is full."""

    num_slots: int
    block_size: int = 16
    preemption: PreemptionMode = "recompute"
    max_num_seqs: int = MAX_NUM_SEQS


class Beams(Protocol):
    """Choice of the beams that live on, for requests that are beam searches."""

    def survivors(self, group: SequenceGroup) -> Seq[tuple[Sequence, int]]:
        """Choose the survivors of a group that awaits its decision: each a live beam and its next token."""

    def record_survivors(self, group: SequenceGroup, beams: list[Sequence]) -> None:
        """Receive the sequences that hold the survivors, best first."""

    def drop_search(self, group: SequenceGroup) -> None:
        """Drop a search that ended."""


class VirtualQuire:
    """One worker's worth of requests."""

    def __init__(self, config: QuireConfig, costs: CostModel, *, beams: Beams | None = None) -> None:
        self._config = config
        self._costs = costs
        self._beams = beams
        self._arrivals: dict[SequenceGroup, Request] = {}
        self._num_added = 0  # sequences

    def serve(self, trace: Trace) -> Outcome:
        """Serve all requests of the trace, from the first arrival to the last token."""
        outcome = Outcome()
        scheduler = self._new_scheduler(has_prefix=trace.num_prefix > 0)
        requests, num_come, now_s = trace.requests, 0, 0.0
        while True:
            while num_come < len(requests) and requests[num_come].arrival_s <= now_s:
                scheduler.add(self._new_group(requests[num_come], trace, arrival=num_come))
                num_come += 1
            plan = scheduler.schedule(WORKER)
            if plan is None:
                if num_come == len(requests):
                    break
                now_s = requests[num_come].arrival_s
                continue
            if now_s < trace.duration_s:
                self._count(outcome, scheduler, plan, trace.width)
            now_s += self._duration_s(plan)
            self._apply(scheduler, plan, outcome, now_s)
        assert not self._arrivals, "requests are unfinished, and nothing can run"
        (stats,) = scheduler.stats().workers
        outcome.num_preemptions = stats.num_preemptions
        return outcome

    def _new_scheduler(self, *, has_prefix: bool) -> Scheduler:
        config = self._config
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
                max_num_seqs=config.max_num_seqs,
                watermark=WATERMARK,
                pipeline_depth=1,
                enable_prefix_cache=has_prefix,  # else the traces have lengths and no text: nothing is there twice
                preemption=config.preemption,
            )
        )
        num_blocks = config.num_slots // config.block_size
        scheduler.workers.add_worker(
            WORKER,
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_seats=config.max_num_seqs,
            num_host_blocks=num_blocks if config.preemption != "recompute" else 0,
        )
        return scheduler

    def _new_group(self, request: Request, trace: Trace, *, arrival: int) -> SequenceGroup:
        own = request.num_input - trace.num_prefix
        prompt = [*range(trace.num_prefix), *[-1 - arrival] * own]
        sequences = [
            Sequence(
                seq_id=self._num_added + index,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                max_tokens=request.num_output,
                stop_token_ids=frozenset(),
            )
            for index in range(trace.width)
        ]
        self._num_added += trace.width
        awaits_host = self._beams is not None
        group = SequenceGroup(sequences, arrival=arrival, awaits_host=awaits_host, num_candidates=trace.width)
        self._arrivals[group] = request
        return group

    def _duration_s(self, plan: StepPlan) -> float:
        num_rows = len(plan.sequences)
        num_tokens = sum(plan.num_tokens)
        num_prompt_tokens = 0 if num_tokens == num_rows else sum(each for each in plan.num_tokens if each > 1)
        duration_s = self._costs.of(max(num_rows, len(plan.sampled_sequences)), num_prompt_tokens)
        num_moved = (len(plan.swap_out) + len(plan.swap_in)) // 2
        return duration_s + self._costs.of_swap(num_moved, self._config.block_size)

    def _apply(self, scheduler: Scheduler, plan: StepPlan, outcome: Outcome, now_s: float) -> None:
        tokens = [sequence.seq_id for sequence in plan.sampled_sequences]
        for sequence, _ in scheduler.apply(WORKER, plan.step_id, tokens):
            if len(sequence.token_ids) == sequence.num_prompt_tokens + sequence.max_tokens:
                scheduler.finish(sequence)
                self._note_end(sequence.group, outcome, now_s)
        if self._beams is not None:
            for group in dict.fromkeys(plan.sequences[row].group for row in plan.candidate_rows):
                self._decide(scheduler, self._beams, group, outcome, now_s)

    def _decide(self, scheduler: Scheduler, beams: Beams, group: SequenceGroup, outcome: Outcome, now_s: float) -> None:
        if not group.awaits_decision:
            return
        live = group.live[0]
        if live.num_output_tokens + 1 == live.max_tokens:
            scheduler.finish_group(group)
            beams.drop_search(group)
            self._note_end(group, outcome, now_s)
        else:
            beams.record_survivors(group, scheduler.replace_beams(group, beams.survivors(group)))

    def _note_end(self, group: SequenceGroup, outcome: Outcome, now_s: float) -> None:
        if group.is_finished:
            request = self._arrivals.pop(group)
            outcome.end(now_s - request.arrival_s, request.num_output)

    def _count(self, outcome: Outcome, scheduler: Scheduler, plan: StepPlan, width: int) -> None:
        outcome.num_steps += 1
        outcome.num_batched += -(-len(plan.sequences) // width)
        if outcome.num_steps % STEPS_A_LOOK:
            return
        (stats,) = scheduler.stats().workers
        memory = outcome.memory
        memory.pool += self._config.num_slots
        memory.filled += stats.num_filled_token_slots
        memory.reserved += stats.num_reserved_token_slots
        memory.fragmented += stats.num_fragmented_token_slots
