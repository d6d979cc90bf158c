"""Planning of one worker's next step: whose turn it is, the rows of running sequences, the groups that start.

Decides the order of these; what each does is in `trials`, `aging`, `step_rows` and `admitting`.
"""

from scheduler_svc.core.admitting import GroupStarter
from scheduler_svc.core.aging import Aging
from scheduler_svc.core.group_places import GroupPlaces
from scheduler_svc.core.handing_over import groups_to_hand_over
from scheduler_svc.core.load_sharing import group_to_share
from scheduler_svc.core.placement import WorkerLimits
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.step_plan import StepPlan, seats_of
from scheduler_svc.core.step_rows import add_running_rows, force_preemption
from scheduler_svc.core.trials import Trials
from scheduler_svc.core.worker_state import PlannedStep, WorkerState


class StepPlanner:
    """Planner of steps, for all workers."""

    def __init__(self, config: SchedulerConfig, limits: WorkerLimits, places: GroupPlaces, trials: Trials) -> None:
        self._limits = limits
        self._pipeline_depth = config.pipeline_depth
        self._num_spare_positions = config.num_spare_positions
        self._preempt_every = config.preempt_every
        self._places = places
        self._trials = trials
        self._starter = GroupStarter(places.waiting, limits, places.fetches)
        self._aging = Aging(config.order, config.priority_patience_s)

    def plan_step(self, worker: WorkerState, now_s: float) -> StepPlan | None:
        """Plan the worker's next step, and put it in flight. None: nothing to do now, or its pipeline is full."""
        workers = self._places.workers.values()
        if len(worker.in_flight) >= self._pipeline_depth:
            return None
        if worker.needs_snapshot and worker.in_flight:
            return None  # a snapshot has the next token of every seat: all must be known
        if not self._trials.begin_turn(worker, workers):
            return None
        worker.cache_decoded_blocks()
        for group in groups_to_hand_over(worker, workers, self._places.waiting, self._limits):
            group.is_leaving = True
            worker.set_aside(group)
            self._places.place_preempted(group)
        if not self._places.waiting:
            self._take_from_busiest(worker)
        self._places.fetches.place(worker)
        self._aging.age(self._places.waiting, workers, now_s)
        step = self._plan(worker, now_s)
        if step is None and self._trials.pass_turn(worker, workers):
            step = self._plan(worker, now_s)
        if step is None:
            return None
        _complete_plan(worker, step)
        worker.in_flight.append(step)
        return step.plan

    def _take_from_busiest(self, worker: WorkerState) -> None:
        """Have a running group of a much busier worker go on here."""
        found = group_to_share(worker, self._places.workers.values(), self._places.fetches, self._limits)
        if found is not None:
            source, group = found
            group.is_leaving = True
            source.set_aside(group)
            group.destination = worker.worker_id
            self._places.place_preempted(group)

    def _plan(self, worker: WorkerState, now_s: float) -> PlannedStep | None:
        """Return a step with rows; None if there is nothing to compute."""
        plan = StepPlan(worker.worker_id, worker.next_step_id, worker.needs_snapshot, self._num_spare_positions)
        step = PlannedStep(plan)
        workers = self._places.workers.values()
        if self._preempt_every and plan.step_id % self._preempt_every == 0:
            force_preemption(worker, step)
        budget = add_running_rows(worker, step, worker.max_num_batched_tokens, has_suspects=self._trials.has_suspects)
        for group in step.preempted:
            self._places.place_preempted(group)
        # A group that this plan preempted does not start again in it, unless there is nothing else to do.
        if worker.trial is not None:
            num_placed = len(step.preempted)
            self._starter.start_suspects(worker, workers, step, budget)
            for group in step.preempted[num_placed:]:
                self._places.place_preempted(group)
        elif not (step.preempted and plan.sequences):
            self._starter.start_groups(worker, workers, step, budget, now_s)
        return step if plan.sequences else None


def _complete_plan(worker: WorkerState, step: PlannedStep) -> None:
    """Fill in what the worker is told besides the rows, and count the step."""
    plan = step.plan
    plan.seats = seats_of(plan.sequences)
    if not plan.snapshot:
        plan.freed_seats = worker.freed_seats
    else:
        plan.whole = [sequence for sequence in worker.running if sequence.first_step_id]
        plan.append_pairs = []
    plan.swap_out = worker.unsent_swap_out
    worker.unsent_swap_out = []
    step.placed, worker.unsent_placed = worker.unsent_placed, {}
    plan.placed = [n for block, each in step.placed.items() for n in (each.fetch_id, each.fetch_index, block)]
    worker.freed_seats = []
    worker.needs_snapshot = False
    worker.next_step_id += 1
    if worker.trial is not None:
        worker.num_trial_steps += 1
    else:
        worker.num_steps_between += 1
