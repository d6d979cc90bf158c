"""The scheduler: who computes what in the next step of a worker, and what its results mean for the sequences.

One rule: `num_computed_tokens` chases `num_tokens`. First come, first served within a priority, one waiting queue
for all workers, chunked prefill under a token budget; groups are started, preempted and restored as a whole.
Pure: it knows nothing of the wire, clocks, requests or stop conditions; those come in as calls.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq

from scheduler_svc.core import beam_groups, pins, placement
from scheduler_svc.core.admitting import GroupStarter, is_too_late
from scheduler_svc.core.aging import Aging
from scheduler_svc.core.draining import leaving_groups, num_sequences_on, serving_workers
from scheduler_svc.core.isolation import Isolation, Verdict
from scheduler_svc.core.memory_use import worker_stats
from scheduler_svc.core.ordering import running_rank
from scheduler_svc.core.pausing import pause_group, unbind_paused
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.scheduler_stats import SchedulerStats
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.slot_use import SlotUse, slot_use
from scheduler_svc.core.step_plan import StepPlan, slot_of
from scheduler_svc.core.step_rows import add_running_rows, force_preemption
from scheduler_svc.core.swapping import drop_host_copy, free_host_blocks, insert_swapped
from scheduler_svc.core.undoing import undo_steps
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.waiting_reasons import WaitingReason, waiting_reason
from scheduler_svc.core.worker_check import check_paused, check_waiting, check_worker
from scheduler_svc.core.worker_state import PlannedStep, WorkerState


class Scheduler:
    """All groups and all workers. Every call leaves a state in which `check()` holds.

    After any call that changes something, every worker should be asked to `schedule()`: one worker may leave the head
    of the queue, or those under suspicion, to another.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._limits = WorkerLimits(max_num_seqs=config.max_num_seqs, pipeline_depth=config.pipeline_depth)
        self._workers: dict[str, WorkerState] = {}
        self._absent: WorkerState | None = None  # like the last that was here, while none is
        self._waiting = WaitingQueue(config.order)
        self._paused: dict[SequenceGroup, None] = {}
        self._starter = GroupStarter(self._waiting, self._limits)
        self._isolation = Isolation(self._waiting, self._limits)
        self._aging = Aging(config.order, config.priority_patience_s)

    def add_worker(
        self,
        worker_id: str,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_num_batched_tokens: int | None = None,
        num_host_blocks: int = 0,
        max_model_len: int | None = None,
    ) -> None:
        """`max_num_batched_tokens`: the most it can compute in a step, if that is a limit; `max_model_len`: the longest
        sequence that it takes, if that is one.

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
            num_host_blocks=num_host_blocks,
            preemption=self._config.preemption,
            max_model_len=max_model_len,
        )
        self._absent = None
        self._waiting.restore_deferred()
        if len(self._workers) == 1:
            for group in [*self._waiting, *self._paused]:  # they may be of another block size
                group.shares = None
                for sequence in group.sequences:
                    sequence.block_hashes.clear()
        self._move_from_draining()

    def remove_worker(self, worker_id: str) -> list[Sequence]:
        """It is gone, with the KV and the tokens in flight. Returns what ran there; it waits again."""
        worker = self._workers.pop(worker_id)
        if not self._workers:
            self._absent = worker.empty_copy()
        for step in worker.in_flight:
            beams = [step.plan.sequences[row] for row in step.plan.candidate_rows]
            for sequence in [*step.plan.sampled_sequences, *beams]:
                sequence.num_pending_tokens = 0
        running = [sequence.group for sequence in worker.running]
        groups = dict.fromkeys([*running, *worker.parked, *worker.swapped, *worker.paused])
        for group in list(groups):
            drop_host_copy(worker, group)
            for sequence in group.unfinished:
                sequence.leave_worker()
                sequence.lose_computed_tokens()
            if group.is_paused:
                unbind_paused(worker, group)
            else:
                self._wait(group, SequenceStatus.PREEMPTED)
        return worker.running

    def add(self, group: SequenceGroup, *, is_paused: bool = False) -> None:
        """It waits for a worker, or until `resume` first. Tokens beyond its prompt are those of an earlier life.

        With those it counts as preempted: what was computed of it, all but each member's last token, is to be computed
        again.
        """
        for sequence in group.live:
            if sequence.status is not SequenceStatus.WAITING or group in self._waiting or group in self._paused:
                raise ValueError(f"sequence {sequence.seq_id} was added before")
            if sequence.has_all_tokens:
                raise ValueError(f"sequence {sequence.seq_id} has its {sequence.max_tokens} tokens already")
        if group.is_finished:
            raise ValueError(f"group {group.arrival} was added before: its sequences are finished")
        if group.awaits_host:
            beam_groups.idle_unused_beams(group)
        if any(sequence.num_output_tokens for sequence in group.live):
            for sequence in group.live:
                sequence.status = SequenceStatus.PREEMPTED
                sequence.num_lost_tokens = sequence.num_tokens - 1
        group.order = running_rank(self._config.order, group)
        if is_paused:
            group.is_paused = True
            self._paused[group] = None
        else:
            self._waiting.push(group)

    def finish(self, sequence: Sequence) -> None:
        """Finished or cancelled, in whatever state; again is harmless. A group ends with its last member.

        Blocks and slot are free at once, or when the last step in flight that uses them is done.
        """
        if sequence.is_finished:
            return
        group = sequence.group
        if sequence.slot is not None:
            self._worker_of(group).stop_sequence(sequence)
        if sequence.host_blocks:
            free_host_blocks(self._worker_of(group), [sequence])
        sequence.status = SequenceStatus.FINISHED
        sequence.worker_id = None
        group.shares = None
        if not any(other.is_live for other in group.sequences):
            for beam in group.unfinished:  # idle ones
                self.finish(beam)
            self._end(group)
        elif group in self._waiting:
            self._waiting.resize(group)
        elif group.worker_id is not None:
            worker = self._worker_of(group)
            if any(other.source is sequence and other.is_live for other in group.sequences):
                worker.preempt(group)  # who waited for its blocks to be computed begins anew
            if group.is_paused:
                unbind_paused(worker, group)
            else:
                self._unpark(worker, group)

    def finish_group(self, group: SequenceGroup) -> None:
        """Finish every member; again is harmless."""
        for sequence in reversed(group.sequences):  # those that wait for another go before it
            self.finish(sequence)

    def forget_group(self, group: SequenceGroup) -> None:
        """It has ended, and nobody will ask for its members: a step in flight may still have some, but not by it.

        Group and members name each other; so all are freed with the last use of each, not by the garbage collector.
        """
        assert group.is_finished, f"group {group.arrival} is forgotten before its end"
        group.sequences = []

    def pause(self, group: SequenceGroup, *, keep_on_host: bool) -> None:
        """Take a group off its worker, or out of the queue, until `resume`. Tokens in flight still come.

        `keep_on_host`: its blocks go to the host pool of its worker, or stay there, where there is room; else they are
        to be computed again. Harmless if it is paused or has ended; but without `keep_on_host` it gives up its host
        blocks.
        """
        if group.is_finished:
            return
        group.is_paused = True
        group.waits_since_s = None
        self._paused[group] = None
        self._waiting.discard(group)
        if group.worker_id is not None:
            pause_group(self._worker_of(group), group, keep_on_host=keep_on_host)
        self._isolation.suspend_group(group)

    def resume(self, group: SequenceGroup) -> None:
        """A paused group waits again, at the place of its arrival. Harmless if it is not paused."""
        if group not in self._paused:
            return
        del self._paused[group]
        group.is_paused = False
        self._isolation.restore_group(group)
        if group.worker_id is None:
            self._waiting.push(group)
            return
        worker = self._worker_of(group)
        del worker.paused[group]
        worker.parked[group] = None
        self._unpark(worker, group)

    def schedule(self, worker_id: str, now_s: float = 0.0) -> StepPlan | None:
        """The next step of a worker. None: nothing to do now, or its pipeline is full.

        What cannot meet its deadline any more at `now_s` is not begun: see `expired_groups`.
        """
        worker, workers = self._workers[worker_id], self._workers.values()
        if len(worker.in_flight) >= self._config.pipeline_depth:
            return None
        if worker.needs_snapshot and worker.in_flight:
            return None  # a snapshot says every slot's next token: all must be known
        if not self._isolation.begin_turn(worker, workers):
            return None
        worker.cache_decoded_blocks()
        self._aging.age(self._waiting, workers, now_s)
        plan = self._plan(worker, now_s)
        if plan is None and self._isolation.pass_turn(worker, workers):
            plan = self._plan(worker, now_s)
        return plan

    def _plan(self, worker: WorkerState, now_s: float) -> StepPlan | None:
        plan = StepPlan(worker.worker_id, worker.next_step_id, worker.needs_snapshot)
        step = PlannedStep(plan)
        if self._config.preempt_every and plan.step_id % self._config.preempt_every == 0:
            force_preemption(worker, step)
        budget = add_running_rows(worker, step, worker.max_num_batched_tokens)
        for group in step.preempted:
            self._unpark(worker, group)
        # What was preempted does not come back in the same breath, unless there is nothing else to do.
        if worker.trial is not None:
            num_unparked = len(step.preempted)
            self._starter.admit_suspects(worker, self._workers.values(), step, budget)
            for group in step.preempted[num_unparked:]:
                self._unpark(worker, group)
        elif not (step.preempted and plan.sequences):
            self._starter.admit(worker, self._workers.values(), step, budget, now_s)
        if not plan.sequences:
            return None
        plan.slots = [slot_of(sequence) for sequence in plan.sequences]
        if not plan.snapshot:
            plan.freed_slots = worker.freed_slots
        else:
            plan.whole = [sequence for sequence in worker.running if sequence.first_step_id]
            plan.append_pairs = []
        plan.swap_out = worker.unsent_swap_out
        worker.unsent_swap_out = []
        worker.freed_slots = []
        worker.needs_snapshot = False
        worker.next_step_id += 1
        if worker.trial is not None:
            worker.num_trial_steps += 1
        else:
            worker.num_steps_between += 1
        worker.in_flight.append(step)
        return plan

    def cache_decoded_blocks(self, worker_id: str) -> None:
        """Bring the prefix cache up to date: best while a step is executed; else the next `schedule` does it."""
        self._workers[worker_id].cache_decoded_blocks()

    def apply(self, worker_id: str, step_id: int, token_ids: Collection[int]) -> list[tuple[Sequence, int]]:
        """Take the result of the oldest step in flight; `token_ids` stand beside its `sampled_sequences`.

        Returns each sequence that got a token, with the token. The caller decides what ends with it, and calls
        `finish`. Raises ValueError, and changes nothing, if the result is not that of the oldest step.
        """
        worker = self._workers[worker_id]
        plan = worker.in_flight[0].plan if worker.in_flight else None
        if plan is None or plan.step_id != step_id:
            raise ValueError(f"worker {worker_id}: result of step {step_id} out of turn")
        if len(token_ids) != len(plan.sampled_sequences):
            num_samples = len(plan.sampled_sequences)
            raise ValueError(f"worker {worker_id}: {len(token_ids)} tokens for {num_samples} samples")
        appended = []
        for sequence, token_id in zip(plan.sampled_sequences, token_ids, strict=True):
            sequence.num_pending_tokens -= 1
            if sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.token_ids.append(token_id)
            appended.append((sequence, token_id))
        for row in plan.candidate_rows:
            plan.sequences[row].num_pending_tokens -= 1
        worker.complete_step()
        self._unpark_all(worker)
        return appended

    def replace_beams(self, group: SequenceGroup, survivors: Seq[tuple[Sequence, int]]) -> list[Sequence]:
        """Decide how a beam group goes on, while it `awaits_decision`: each survivor is a live beam and its next token.

        The first child of a beam goes on in its place; others fork from it into idle members, which share its blocks.
        Beams without a child give back their blocks at once and are idle. Returns the beams beside the survivors.
        Candidates that came before the group was preempted are void: the rows that give them are computed again.
        Raises ValueError, and changes nothing, if the group does not await a decision, has no place for so many,
        or would have two beams that are the same.
        """
        beam_groups.check_decision(group, survivors)
        return beam_groups.replace_beams(self._worker_of(group), group, survivors)

    def rollback(self, worker_id: str) -> None:
        """No step in flight on this worker was executed: take them back. The next plan is a snapshot."""
        worker = self._workers[worker_id]
        for group in undo_steps(worker):
            never_ran = all(not s.num_preemptions and not s.num_output_tokens for s in group.live)
            self._wait(group, SequenceStatus.WAITING if never_ran else SequenceStatus.PREEMPTED)
        self._unpark_all(worker)

    def record_executed_step(self, plan: StepPlan) -> set[str]:
        """This plan was executed, and its answer believed: who has come past the place of an incident is cleared.

        Returns other workers whose answers about such a place could not be believed: they are at fault.
        """
        return self._isolation.record_executed_step(plan)

    def record_failed_step(
        self,
        plans: Iterable[StepPlan],
        *,
        suspects: Collection[SequenceGroup] | None = None,
        is_disbelieved: bool = False,
    ) -> list[Verdict]:
        """These plans of a worker failed in the model, and were rolled back: who was in them is tried apart.

        If another worker could hold it, and has not failed it, it is tried there: all workers should be asked.
        `suspects`: who of them is concerned; None: everybody. `is_disbelieved`: the worker's answer cannot be believed,
        so what it has computed of them is computed again, wherever that is.
        The groups of the verdicts are for the caller to end.
        """
        plans, workers = list(plans), self._workers.values()
        for plan in plans:
            worker = self._workers[plan.worker_id]
            for group in dict.fromkeys(sequence.group for sequence in plan.sequences):
                if suspects is not None and group not in suspects:
                    continue
                is_there = group.worker_id == worker.worker_id and any(s.slot is not None for s in group.unfinished)
                if is_there and (is_disbelieved or self._isolation.may_pass_elsewhere(group, worker, workers)):
                    if is_disbelieved:
                        worker.uncache_blocks(group)
                    worker.preempt(group)
                    self._unpark(worker, group)
        return self._isolation.record_failed_step(plans, workers, suspects=suspects, is_disbelieved=is_disbelieved)

    def forgive_worker(self, worker_id: str) -> None:
        """What failed on this worker counts against nobody any more: it is out of service, or another process."""
        self._isolation.forgive_worker(worker_id)

    def record_worker_loss(self, worker_id: str, now_s: float = 0.0) -> list[Verdict]:
        """This worker is lost at `now_s`, perhaps by what is in flight there; to be told before it is removed.

        The groups of the verdicts are for the caller to end, once it is removed.
        """
        return self._isolation.record_worker_loss(self._workers[worker_id], now_s)

    def record_costs(
        self,
        worker_id: str,
        *,
        prefill_tokens_per_s: float,
        prefill_step_tokens: float | None = None,
        swap_blocks_per_s: float | None = None,
    ) -> None:
        """What was measured of a worker, as in `PreemptionCosts`. To be told when it has changed, not in each step.

        Until then `auto` recomputes, and only a deadline that has passed keeps work from being begun.
        """
        self._workers[worker_id].costs = PreemptionCosts(
            prefill_tokens_per_s=prefill_tokens_per_s,
            prefill_step_tokens=prefill_step_tokens,
            swap_blocks_per_s=swap_blocks_per_s,
        )
        self._waiting.restore_deferred()  # what seemed too late may be in time

    def drain(self, worker_id: str) -> None:
        """It gets nothing new from now on, and what is there moves to other workers, if any can hold it.

        What has run and can be nowhere else ends there. Again is harmless.
        """
        self._workers[worker_id].is_draining = True
        self._move_from_draining()

    def undo_drain(self, worker_id: str) -> None:
        """It serves as before. Harmless if it did all the time."""
        self._workers[worker_id].is_draining = False
        self._waiting.restore_deferred()
        self._move_from_draining()

    def num_sequences_on(self, worker_id: str) -> int:
        """Those that run there, and those that are preempted and still bound to it."""
        return num_sequences_on(self._workers[worker_id])

    def expired_groups(self, now_s: float) -> list[SequenceGroup]:
        """Groups that never ran and whose deadline passes before their prompt could be computed, for the caller to end.

        Looks at all that wait.
        """
        workers = list(self._workers.values())
        return [group for group in self._waiting if is_too_late(group, workers, now_s)]

    def pin(self, worker_id: str, name: str, block_hashes: Seq[bytes]) -> bool:
        """Keep the cached blocks with these hashes there until `unpin`. False: not all of them are there (any more).

        Raises PinRefusedError if a group that was admitted might then not fit, ValueError for a name in use.
        """
        worker = self._workers[worker_id]
        if name in worker.pins:
            raise ValueError(f"{name} is pinned on worker {worker_id} already: unpin it first")
        blocks = pins.pinned_blocks(worker, block_hashes)
        if blocks is None:
            return False
        apart = [g for g in self._paused if g.worker_id is None or self._worker_of(g).is_draining]
        elsewhere = [*self._waiting, *apart, *leaving_groups(self._workers.values())]
        pins.check_promises(worker, blocks, serving_workers(self._workers.values()), elsewhere, self._limits)
        pins.add_pin(worker, name, blocks)
        return True

    def unpin(self, worker_id: str, name: str) -> None:
        """The blocks may be evicted again; harmless if there is no such pin."""
        pins.remove_pin(self._workers[worker_id], name)
        self._waiting.restore_deferred()  # what was too large may fit now

    def request_snapshot(self, worker_id: str) -> None:
        """The next plan is a snapshot. It is made once no step is in flight."""
        self._workers[worker_id].needs_snapshot = True

    def queue_size(self) -> tuple[int, int]:
        """Groups in the queue, and their tokens; a prompt that a group shares counts once."""
        return self._waiting.num_groups, self._waiting.num_tokens

    def queue_size_of(self, owner: str) -> tuple[int, int]:
        """The same of one owner."""
        return self._waiting.size_of(owner)

    def num_in_order(self) -> int:
        """Groups in the queue that are served in order: neither under suspicion, nor such as nobody can take now."""
        return len(self._waiting)

    def num_served(self) -> int:
        """Groups that have left the queue for a worker so far; one that was preempted leaves it again."""
        return self._waiting.num_served

    def num_ahead(self, priority: int, deadline_s: float | None) -> int:
        """Groups in order that are served before one that would come now."""
        return self._waiting.num_ahead(priority, deadline_s)

    def waiting_reason(self, group: SequenceGroup) -> WaitingReason | None:
        """What the group waits for; None if it runs or has ended."""
        return waiting_reason(group, self._waiting, self._workers.values(), self._limits)

    def max_tokens_that_fit(self, num_prompt_tokens: int = 0, num_sequences: int = 1, *, with_pins: bool = True) -> int:
        """Tokens (prompt and output) of each sequence of the largest group that every present worker could hold alone.

        Workers that drain count where there is no other; where none is present, the last that was. 0 before the first.
        `num_prompt_tokens` are those that its `num_sequences` share. Without `with_pins`: if nothing were pinned.
        """
        return min(
            (
                placement.max_tokens_of_each(
                    worker, self._limits, num_prompt_tokens, num_sequences, with_pins=with_pins
                )
                for worker in self._yardsticks()
            ),
            default=0,
        )

    def max_sequences_that_fit(self) -> int:
        """Sequences of the widest group that could be held alone, by the workers of `max_tokens_that_fit`."""
        most = self._limits.max_num_seqs
        return min(
            (min(most, worker.num_slots, worker.capacity_blocks) for worker in self._yardsticks()),
            default=0,
        )

    def slot_use(self) -> list[SlotUse]:
        """Of each worker that newcomers are given to."""
        return slot_use(self._workers.values(), self._limits)

    def num_pinned_blocks(self) -> int:
        """Of the worker on which pins hold the most."""
        return max((worker.num_pinned_blocks for worker in self._workers.values()), default=0)

    def stats(self) -> SchedulerStats:
        workers = self._workers.values()
        kept = [group for worker in workers for group in [*worker.parked, *worker.swapped]]
        return SchedulerStats(
            num_waiting=self._waiting.num_sequences + sum(len(group.live) for group in kept),
            num_waiting_groups=self._waiting.num_groups + len(kept),
            num_paused_groups=len(self._paused),
            workers=tuple(worker_stats(worker) for worker in workers),
        )

    def check(self) -> None:
        """Assert the invariants of every worker and of the queue."""
        for worker in self._workers.values():
            check_worker(worker)
            assert len(worker.in_flight) <= self._config.pipeline_depth
            assert worker.num_members <= self._config.max_num_seqs
        self._isolation.check()
        self._waiting.check()
        check_waiting(self._waiting)
        check_paused(self._paused)

    def _move_from_draining(self) -> None:
        for group in leaving_groups(self._workers.values()):
            worker = self._worker_of(group)
            if not placement.has_other_place(worker, group, self._workers.values(), self._limits):
                continue
            if group.swap_step is None:
                worker.preempt(group)
            self._unpark(worker, group)

    def _yardsticks(self) -> list[WorkerState]:
        """Who says what fits."""
        return serving_workers(self._workers.values()) or ([self._absent] if self._absent is not None else [])

    def _worker_of(self, group: SequenceGroup) -> WorkerState:
        assert group.worker_id is not None
        return self._workers[group.worker_id]

    def _wait(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """Into the queue again, at the place of its arrival."""
        group.worker_id = None
        for sequence in group.live:
            sequence.status = status
            sequence.worker_id = None
        self._waiting.push(group)

    def _unpark_all(self, worker: WorkerState) -> None:
        for group in list(worker.parked):
            self._unpark(worker, group)
        for group in list(worker.paused):
            unbind_paused(worker, group)

    def _unpark(self, worker: WorkerState, group: SequenceGroup) -> None:
        """If it was preempted there, it waits for a place, once its tokens are known: here if it is swapped."""
        if any(s.status is SequenceStatus.RUNNING for s in group.sequences) or group.num_pending_tokens:
            return
        worker.parked.pop(group, None)
        others = self._workers.values() if worker.is_draining else ()
        if group.swap_step is not None and placement.has_other_place(worker, group, others, self._limits):
            drop_host_copy(worker, group)
        if group.swap_step is None:
            self._wait(group, SequenceStatus.PREEMPTED)
        elif group not in worker.swapped:
            insert_swapped(worker, group)

    def _end(self, group: SequenceGroup) -> None:
        """No member is live any more."""
        self._waiting.discard(group)
        self._paused.pop(group, None)
        group.is_paused = False
        self._isolation.forget_group(group)
        if group.worker_id is not None:
            worker = self._worker_of(group)
            worker.parked.pop(group, None)
            worker.paused.pop(group, None)
            if group in worker.swapped:
                worker.swapped.remove(group)
            group.worker_id = None
