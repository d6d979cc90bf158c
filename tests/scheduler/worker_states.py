"""Workers and groups for tests of single functions of the core, without a scheduler. Blocks hold 4 tokens."""

from typing import Any

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.starting import plan_start, start_group
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.core.step_rows import add_row
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.core.worker_state import PlannedStep, WorkerState

BLOCK_SIZE = 4


def make_worker(worker_id: str = "w", *, num_blocks: int = 40, **options: Any) -> WorkerState:
    settings: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_seats": 16,
        "num_watermark_blocks": 0,
        "max_num_batched_tokens": 64,
        "enable_prefix_cache": True,
        "num_host_blocks": 0,
        "preemption": "recompute",
    }
    return WorkerState(worker_id, num_blocks=num_blocks, **settings | options)


def make_group(
    prompt: list[int], *outputs: list[int], arrival: int = 0, max_tokens: int = 40, **options: Any
) -> SequenceGroup:
    """Make a group that waits, in no queue."""
    group = make_new_group(prompt, *outputs, arrival=arrival, max_tokens=max_tokens, **options)
    group.move_to(GroupState.WAITING)
    return group


def make_new_group(
    prompt: list[int], *outputs: list[int], arrival: int = 0, max_tokens: int = 40, **options: Any
) -> SequenceGroup:
    """Make a group with a member for each of the outputs; without any, of one member."""
    sequences = [
        Sequence(100 * arrival + index, prompt + output, len(prompt), max_tokens, frozenset())
        for index, output in enumerate(outputs or ([],))
    ]
    group = SequenceGroup(sequences, arrival=arrival, **options)
    group.order = (group.priority, arrival)
    return group


def pop_head(queue: WaitingQueue) -> SequenceGroup:
    """Take the head out of a queue."""
    group = queue.peek()
    assert group is not None
    queue.pop(group)
    return group


def start(worker: WorkerState, group: SequenceGroup) -> SequenceGroup:
    """Start a group, without a row."""
    start_group(worker, group, plan_start(worker, group), new_step(worker))
    return group


def new_step(worker: WorkerState) -> PlannedStep:
    """Begin the worker's next step."""
    return PlannedStep(StepPlan(worker.worker_id, worker.next_step_id, snapshot=False))


def launch(worker: WorkerState, step: PlannedStep) -> PlannedStep:
    """Put a step in flight."""
    worker.in_flight.append(step)
    worker.next_step_id += 1
    return step


def launch_rows(worker: WorkerState, *groups: SequenceGroup, budget: int = 64) -> PlannedStep:
    """Put a step with a row of each live member in flight; `budget`: the most tokens of each row."""
    step = new_step(worker)
    for group in groups:
        for sequence in group.live:
            add_row(worker, step, sequence, budget)
    return launch(worker, step)


def cache_prompt(worker: WorkerState, prompt: list[int]) -> None:
    """Leave the full blocks of a prompt in the cache, of a group that has ended."""
    group = start(worker, make_group(prompt, arrival=1000 + worker.next_step_id))
    launch_rows(worker, group)
    execute(worker)
    worker.stop_sequence(group.sequences[0])


def execute(worker: WorkerState, token_id: int = 7) -> None:
    """Have the oldest step in flight executed; each sample is `token_id`."""
    plan = worker.in_flight[0].plan
    for sequence in plan.sampled_sequences:
        sequence.num_pending_tokens -= 1
        sequence.token_ids.append(token_id)
    for row in plan.candidate_rows:
        plan.sequences[row].num_pending_tokens -= 1
    worker.complete_step()
