"""Scheduler: decides which sequences compute what in the next step of a worker, and applies the results to them.

One rule: `num_computed_tokens` chases `num_tokens`. First come, first served within a priority, one waiting queue
for all workers, chunked prefill under a token budget; groups are started, preempted and restored as a whole.
Pure: knows nothing of the wire, clocks, requests or stop conditions; the caller tells these.
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq

from scheduler_svc.core import beam_groups
from scheduler_svc.core.admitting import late_groups
from scheduler_svc.core.forced_tokens import append_with_forced, num_forceable
from scheduler_svc.core.group_places import GroupPlaces
from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.isolation import Isolation, Verdict
from scheduler_svc.core.memory_use import work_of, worker_stats
from scheduler_svc.core.ordering import running_rank
from scheduler_svc.core.pausing import bind_paused, stop_for_pause, unbind_paused
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.present_workers import PresentWorkers
from scheduler_svc.core.sampled_tokens import append_sampled
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.scheduler_stats import SchedulerStats
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.step_planning import StepPlanner
from scheduler_svc.core.swapping import free_host_blocks
from scheduler_svc.core.undoing import undo_steps
from scheduler_svc.core.waiting_reasons import WaitingReason, waiting_reason
from scheduler_svc.core.worker_check import check_paused, check_waiting, check_worker


class Scheduler:
    """Scheduler of all groups and all workers. Every call leaves a state in which `check()` holds.

    After any call that changes something, the caller should `schedule()` every worker: one worker may leave the head
    of the queue, or suspects, to another. So it should after a `schedule` that has put groups into the queue.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._limits = WorkerLimits(max_num_seqs=config.max_num_seqs, pipeline_depth=config.pipeline_depth)
        self._places = GroupPlaces(config.order, self._limits, config.block_fetch)
        self._isolation = Isolation(self._places.waiting, self._limits)
        self.fetches = self._places.fetches
        self._planner = StepPlanner(config, self._limits, self._places, self._isolation.trials)
        self.waiting = self._places.waiting  # for its counts; only the core changes it
        self.workers = PresentWorkers(config, self._limits, self._places)

    def add(self, group: SequenceGroup, *, is_paused: bool = False) -> None:
        """Queue a new group, or keep it paused until `resume`. Output tokens that it has are from before a restart.

        With output tokens it counts as preempted: all but each member's last token is to be computed again.
        """
        if group.state is not GroupState.NEW:
            raise ValueError(f"group {group.arrival} was added before")
        for sequence in group.live:
            if sequence.has_all_tokens:
                raise ValueError(f"sequence {sequence.seq_id} has its {sequence.max_tokens} tokens already")
        if group.awaits_host:
            beam_groups.idle_unused_beams(group)
        if any(sequence.num_output_tokens for sequence in group.live):
            for sequence in group.live:
                sequence.status = SequenceStatus.PREEMPTED
                sequence.num_lost_tokens = sequence.num_tokens - 1
        group.order = running_rank(self._config.order, group)
        if is_paused:
            group.move_to(GroupState.PAUSED)
            self._places.paused[group] = None
        else:
            self.waiting.push(group)

    def finish(self, sequence: Sequence) -> None:
        """Finish or cancel a sequence in whatever state. A group ends with its last member. Idempotent.

        Blocks and seat are free at once, or when the last step in flight that uses them is done.
        """
        if sequence.is_finished:
            return
        group = sequence.group
        if sequence.seat is not None:
            self._places.worker_of(group).stop_sequence(sequence)
        if sequence.host_blocks:
            free_host_blocks(self._places.worker_of(group), [sequence])
        sequence.status = SequenceStatus.FINISHED
        sequence.worker_id = None
        group.shares = None
        if not any(other.is_live for other in group.sequences):
            for beam in group.unfinished:  # idle ones
                self.finish(beam)
            if group.state is not GroupState.ENDED:
                self._isolation.forget_group(group)
                self._places.end_group(group)
        elif group in self.waiting:
            self.waiting.resize(group)
        elif group.worker_id is not None:
            worker = self._places.worker_of(group)
            if any(other.source is sequence and other.is_live for other in group.sequences):
                worker.preempt(group)  # members that waited for its blocks to be computed begin anew
            if group.is_paused:
                unbind_paused(worker, group)
            else:
                self._places.place_preempted(group)

    def finish_group(self, group: SequenceGroup) -> None:
        """Finish every member. Idempotent."""
        for sequence in reversed(group.sequences):  # members that wait for another go before it
            self.finish(sequence)

    def forget_group(self, group: SequenceGroup) -> None:
        """Drop the members of a group that has ended; a step in flight may still have some, but not by the group.

        Group and members refer to each other, so this lets each be freed with its last use, not by the garbage
        collector.
        """
        assert group.is_finished, f"group {group.arrival} is forgotten before its end"
        group.sequences = []

    def pause(self, group: SequenceGroup, *, keep_on_host: bool) -> None:
        """Take a group off its worker, or out of the queue, until `resume`. Tokens in flight still come.

        `keep_on_host`: its blocks go to the host pool of its worker, or stay there, if there is room; else they are
        to be computed again. No-op if it has ended; if it is paused, only the lack of `keep_on_host` has an effect.
        """
        if group.is_finished:
            return
        if group.state is GroupState.RUNNING:
            stop_for_pause(self._places.worker_of(group), group, keep_on_host=keep_on_host)
        if not group.is_paused:
            self._places.take_out(group)
            group.move_to(GroupState.PAUSED)
            self._places.paused[group] = None
        group.waits_since_s = None
        if group.worker_id is not None:
            bind_paused(self._places.worker_of(group), group, keep_on_host=keep_on_host)
        self._isolation.suspend_group(group)

    def resume(self, group: SequenceGroup) -> None:
        """Have a paused group wait again, at the place of its arrival. No-op if it is not paused."""
        if not group.is_paused:
            return
        self._places.take_out(group)
        if group.worker_id is None:
            self.waiting.push(group)
        else:
            group.move_to(GroupState.PARKED)
            self._places.worker_of(group).parked[group] = None
            self._places.place_preempted(group)
        self._isolation.restore_group(group)

    def schedule(self, worker_id: str, now_s: float = 0.0) -> StepPlan | None:
        """Plan the next step of a worker. None: nothing to do now, or its pipeline is full.

        A group that can no longer meet its deadline at `now_s` is not started: see `expired_groups`.
        """
        return self._planner.plan_step(self._places.workers[worker_id], now_s)

    def cache_decoded_blocks(self, worker_id: str) -> None:
        """Bring the prefix cache up to date: best while a step is executed; else the next `schedule` does it."""
        self._places.workers[worker_id].cache_decoded_blocks()

    def request_snapshot(self, worker_id: str) -> None:
        """Make the next plan a snapshot. It is made once no step is in flight."""
        self._places.workers[worker_id].needs_snapshot = True

    def apply(
        self, worker_id: str, step_id: int, token_ids: Collection[int], forced: Mapping[int, Seq[int]] | None = None
    ) -> list[tuple[Sequence, int]]:
        """Apply the result of the oldest step in flight; `token_ids` stand beside its `sampled_sequences`.

        Return each token with the sequence that got it; those behind the end of a sequence are dropped. The caller
        decides which sequences end, and calls `finish`. Raises ValueError, and changes nothing, if the result is not
        that of the oldest step.

        Args:
            worker_id: worker that executed the step.
            step_id: the step.
            token_ids: one for each sample.
            forced: tokens before the sampled one that the step computed as well, by index of the sample: at most
                `num_forceable`.
        """
        worker = self._places.workers[worker_id]
        plan = worker.in_flight[0].plan if worker.in_flight else None
        if plan is None or plan.step_id != step_id:
            raise ValueError(f"worker {worker_id}: result of step {step_id} out of turn")
        if len(token_ids) != len(plan.sampled_sequences):
            num_samples = len(plan.sampled_sequences)
            raise ValueError(f"worker {worker_id}: {len(token_ids)} tokens for {num_samples} samples")
        appended = append_with_forced(worker, plan, token_ids, forced) if forced else append_sampled(plan, token_ids)
        for row in plan.candidate_rows:
            plan.sequences[row].num_pending_tokens -= 1
        worker.complete_step()
        self._places.place_parked(worker)
        return appended

    def num_forceable(self, plan: StepPlan, sample: int) -> int:
        """Most tokens that the oldest step in flight may have forced before its sample of this index."""
        return num_forceable(self._places.workers[plan.worker_id], plan, sample)

    def replace_beams(self, group: SequenceGroup, survivors: Seq[tuple[Sequence, int]]) -> list[Sequence]:
        """Continue a beam group that `awaits_decision`: each survivor is a live beam and its next token.

        The first child of a beam takes its place; others fork from it into idle members, which share its blocks.
        Beams without a child free their blocks at once and are idle. Return the beams beside the survivors.
        Candidates from before a preemption of the group are void: the rows that give them are computed again.
        Raises ValueError, and changes nothing, if the group does not await a decision, has no place for so many,
        or would have two beams that are the same.
        """
        beam_groups.check_decision(group, survivors)
        return beam_groups.replace_beams(self._places.worker_of(group), group, survivors)

    def rollback(self, worker_id: str) -> None:
        """Take back every step in flight on this worker: none was executed. The next plan is a snapshot."""
        worker = self._places.workers[worker_id]
        self.fetches.undo_placing(worker)
        for group in undo_steps(worker):
            never_ran = all(not s.num_preemptions and not s.num_output_tokens for s in group.live)
            self._places.queue_again(group, SequenceStatus.WAITING if never_ran else SequenceStatus.PREEMPTED)
        self._places.place_parked(worker)

    def record_executed_step(self, plan: StepPlan) -> set[str]:
        """Record that a plan was executed, and its answer believed. Clear groups past the position of an incident.

        Return other workers whose answers about such a position could not be believed: they are at fault.
        """
        return self._isolation.record_executed_step(plan)

    def record_failed_step(
        self,
        plans: Iterable[StepPlan],
        *,
        suspects: Collection[SequenceGroup] | None = None,
        is_disbelieved: bool = False,
    ) -> list[Verdict]:
        """Record that these plans of a worker failed in the model. They were rolled back; their groups become suspects.

        A group is tried on another worker, if one could hold it and has not failed it: `schedule` every worker.
        `suspects`: the groups concerned; None: each group in the plans. `is_disbelieved`: the worker's answer cannot be
        believed, so all that it has computed of them is computed again.
        The caller must end the groups of the verdicts.
        """
        plans, workers = list(plans), self._places.workers.values()
        for plan in plans:
            worker = self._places.workers[plan.worker_id]
            for group in dict.fromkeys(sequence.group for sequence in plan.sequences):
                if suspects is not None and group not in suspects:
                    continue
                if is_disbelieved:
                    worker.uncache_blocks(group)
                    worker.forget_tails(group)
                is_there = group.state is GroupState.RUNNING and group.worker_id == worker.worker_id
                if is_there and (is_disbelieved or self._isolation.may_pass_elsewhere(group, worker, workers)):
                    worker.preempt(group)
                    self._places.place_preempted(group)
        return self._isolation.record_failed_step(plans, workers, suspects=suspects, is_disbelieved=is_disbelieved)

    def forgive_worker(self, worker_id: str) -> None:
        """Hold the failures on this worker against no group any more: it is out of service."""
        self._isolation.forgive_worker(worker_id)

    def record_worker_loss(self, worker_id: str, now_s: float = 0.0, *, is_proven: bool = False) -> list[Verdict]:
        """Record that a worker is lost at `now_s`, perhaps by what is in flight there. Call it before `remove_worker`.

        `is_proven`: it counts even if `record_return` says that the process lives on. The caller must end the groups of
        the verdicts, after `remove_worker`.
        """
        return self._isolation.record_worker_loss(self._places.workers[worker_id], now_s, is_proven=is_proven)

    def record_return(self, worker_id: str, *, is_same_process: bool) -> None:
        """Record that a worker has come, perhaps after a loss: the process of before, or another."""
        if is_same_process:
            self._isolation.excuse_losses(worker_id)
        else:
            self._isolation.confirm_losses(worker_id)
            self._isolation.forgive_worker(worker_id)

    def expired_groups(self, now_s: float) -> list[SequenceGroup]:
        """Return groups that never ran and whose deadline passes before their prompt could be computed.

        The caller must end them. Looks at every group in the queue.
        """
        workers = list(self._places.workers.values())
        return late_groups(self.waiting, workers, now_s)

    def waiting_reason(self, group: SequenceGroup) -> WaitingReason | None:
        """Return what the group waits for; None if it runs or has ended."""
        return waiting_reason(group, self.waiting, self._places.workers.values(), self._limits)

    @property
    def has_groups_to_start(self) -> bool:
        """True if a group waits, in the queue or swapped out: every worker is to be asked when anything changes.

        A worker starts none that is swapped out there while it leaves one that goes before it to another worker.
        """
        return bool(self.waiting.num_groups) or any(worker.swapped for worker in self._places.workers.values())

    def num_uncomputed_tokens(self) -> int:
        """Count the tokens that waiting and running groups are yet to compute, less the next one of each that decodes.

        What a waiting group will find in a cache counts, since nobody knows yet which worker will take it.
        """
        running = (sequence for worker in self._places.workers.values() for sequence in worker.catching_up)
        return self.waiting.num_tokens + sum(s.num_tokens - s.num_computed_tokens for s in running)

    def stats(self) -> SchedulerStats:
        workers = self._places.workers.values()
        bound = [group for worker in workers for group in [*worker.parked, *worker.swapped]]
        return SchedulerStats(
            num_waiting=self.waiting.num_sequences + sum(len(group.live) for group in bound),
            num_waiting_groups=self.waiting.num_groups + len(bound),
            num_swapped_groups=sum(len(worker.swapped) for worker in workers),
            num_paused_groups=len(self._places.paused),
            work=sum(map(work_of, workers), self.workers.departed),
            workers=tuple(worker_stats(worker) for worker in workers),
        )

    def check(self) -> None:
        """Assert that each group is listed as its state says, and the invariants of every worker and of the queue."""
        for worker in self._places.workers.values():
            check_worker(worker)
            assert len(worker.in_flight) <= self._config.pipeline_depth
            assert worker.num_members <= self._config.max_num_seqs
        self._places.check()
        self._isolation.check()
        self.fetches.check()
        check_waiting(self.waiting)
        check_paused(self._places.paused)
