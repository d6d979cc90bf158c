"""Failed steps and lost workers of the core, as clients hear of them."""

import pytest

from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.requests.live.fault_verdicts import FaultVerdicts
from tests.scheduler.core_cluster import Cluster


class Verdicts:
    """One worker at a time, and what is said of groups that are failed."""

    def __init__(self) -> None:
        self.cluster = Cluster(SchedulerConfig(pipeline_depth=1, watermark=0.0))
        self.cluster.add_worker(num_blocks=100)
        self.said: dict[SequenceGroup, str] = {}
        self.num_wakes = 0
        self.faults = FaultVerdicts(self.cluster.scheduler, self.fail, self.wake)

    def fail(self, group: SequenceGroup, error: str) -> None:
        self.said[group] = error
        self.cluster.scheduler.finish_group(group)

    def wake(self) -> None:
        self.num_wakes += 1

    def lose(self) -> int:
        """Lose the worker in its next step; another one comes. Returns how many sequences ran."""
        assert self.cluster.start("w") is not None
        del self.cluster.workers["w"], self.cluster.in_flight["w"], self.cluster.plans["w"]
        lost = self.faults.lose_worker("w", "its stream broke", is_proven=False)
        self.cluster.add_worker(num_blocks=100)
        return len(lost)


@pytest.mark.parametrize(
    ("num_others", "last"),
    [([0, 0, 0], "last 3"), ([1, 0, 0], "last 2"), ([1, 1, 0], "last")],
)
def test_a_request_is_told_how_often_it_ended_workers_and_how_often_alone(num_others: list[int], last: str) -> None:
    """`num_others`: that run beside it at each loss, and end then."""
    verdicts = Verdicts()
    poison = verdicts.cluster.add([1, 2, 3], 9).group
    for number in num_others:
        others = [verdicts.cluster.add([4, 5], 9) for _ in range(number)]
        assert not verdicts.said
        assert verdicts.lose() == 1 + number
        for other in others:
            verdicts.cluster.scheduler.finish(other)
    assert verdicts.said == {
        poison: f"request crashed its worker 3 times, the {last} while running alone; "
        "send another prompt or other parameters: its stream broke"
    }


@pytest.mark.parametrize("is_disbelieved", [False, True])
def test_a_request_is_told_how_often_its_steps_failed_and_workers_are_woken_each_time(is_disbelieved: bool) -> None:
    verdicts = Verdicts()
    poison = verdicts.cluster.add([1, 2, 3], 9).group
    record = verdicts.faults.record_disbelieved_step if is_disbelieved else verdicts.faults.record_failed_step
    for number in range(3):
        assert not verdicts.said and verdicts.num_wakes == number
        plan = verdicts.cluster.start("w")
        assert plan is not None
        verdicts.cluster.fail_steps("w")
        record([plan], "NaN")
    assert verdicts.said == {poison: "the request made the model fail in 3 attempts, the last while running alone: NaN"}
    assert verdicts.num_wakes == 3
