"""A worker in virtual time: executes its steps one after another, each as long as its cost model says."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.fleet.costs import WorkerCosts
from benchmarks.fleet.fleet_config import NETWORK_S
from benchmarks.fleet.timeline import Timeline
from scheduler_svc.core.step_plan import StepPlan


@dataclass(slots=True, eq=False)
class VirtualWorker:
    """State of a worker's process. `shard`: the one that it registers for; None: it has not been told."""

    worker_id: str
    rack: int
    costs: WorkerCosts
    shard: int | None = None
    life: int = 0  # counts its incarnations
    is_alive: bool = True
    is_driven: bool = False  # by the leader of its shard
    moving_to: int | None = None  # shard, while it drains
    led_s: float = 0.0  # when its shard was last seen to have a leader
    free_s: float = 0.0  # end of the last step that it has
    busy_s: float = 0.0  # in all
    died_s: float = 0.0  # moment of its death

    @property
    def incarnation(self) -> str:
        """Name of its present life."""
        return f"{self.worker_id}.{self.life}"

    @property
    def is_in_service(self) -> bool:
        """True if it takes new requests."""
        return self.is_driven

    def execute(self, plan: StepPlan, sent_s: float, timeline: Timeline, answer: Callable[[], None]) -> None:
        """Execute a step behind those that it has. `answer` is called when the scheduler gets the answer."""
        num_rows = len(plan.sequences)
        duration_s = self.costs.of(num_rows, sum(plan.num_tokens), sum(plan.positions) + num_rows)
        self.free_s = max(self.free_s, sent_s + NETWORK_S) + duration_s
        self.busy_s += duration_s
        timeline.at(self.free_s + NETWORK_S, answer)
