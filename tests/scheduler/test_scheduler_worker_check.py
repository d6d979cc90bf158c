"""Checks of the scheduler's state: what is lost, held twice or listed wrongly is noticed. Blocks hold 4 tokens."""

from collections.abc import Callable

import pytest

from scheduler_svc.core.group_state import GroupState
from scheduler_svc.core.incidents import Incidents
from scheduler_svc.core.pins import add_pin
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.swapping import insert_swapped, swap_out
from scheduler_svc.core.worker_check import check_paused, check_waiting, check_worker
from scheduler_svc.core.worker_state import WorkerState
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.worker_states import execute, launch_rows, make_group, make_worker, start


def started(worker: WorkerState, *outputs: list[int], arrival: int, prompt: int = 6) -> SequenceGroup:
    return start(worker, make_group([arrival] * prompt, *outputs, arrival=arrival))


def full_worker() -> WorkerState:
    """Make a worker with forks, members that wait, a pin, a release, and groups swapped, parked and paused there."""
    worker = make_worker(num_host_blocks=20, preemption="swap")
    forks, swapped = started(worker, [], [], arrival=1), started(worker, arrival=2)
    launch_rows(worker, forks, swapped)
    execute(worker)
    swap_out(worker, swapped, worker.next_step_id)
    swapped.move_to(GroupState.SWAPPED)
    insert_swapped(worker, swapped)
    started(worker, [2], [3], arrival=3, prompt=8)  # the second waits for the first
    single, ended, parked, paused, beams = (started(worker, arrival=arrival) for arrival in range(4, 9))
    beams.awaits_host = True
    launch_rows(worker, single, ended, parked, paused, beams)
    worker.stop_sequence(ended.sequences[0])
    worker.preempt(parked)
    worker.set_aside(paused)
    del worker.parked[paused]
    worker.paused[paused] = None
    paused.move_to(GroupState.PAUSED)
    add_pin(worker, "prefix", forks.sequences[0].block_table[:1])
    check_worker(worker)
    return worker


def single_of(worker: WorkerState) -> Sequence:
    return next(sequence for sequence in worker.running if sequence.group.arrival == 4)


def lose_a_block(worker: WorkerState) -> None:
    worker.blocks.allocate_block()


def lose_a_host_block(worker: WorkerState) -> None:
    assert worker.host is not None
    worker.host.allocate_block()


def lose_a_seat(worker: WorkerState) -> None:
    worker.free_seats.pop()


def share_a_block_that_is_written(worker: WorkerState) -> None:
    writer, other = single_of(worker), worker.running[-1]
    assert writer.num_computed_tokens == other.num_computed_tokens == 6
    worker.blocks.free([other.block_table.pop()])
    worker.blocks.share([writer.block_table[1]])
    other.block_table.append(writer.block_table[1])


def read_a_block_that_is_written(worker: WorkerState) -> None:
    writer, reader = single_of(worker), worker.running[-1]
    worker.blocks.free([reader.block_table[0]])
    worker.blocks.share([writer.block_table[1]])
    reader.block_table[0] = writer.block_table[1]


def find_a_block_that_is_written(worker: WorkerState) -> None:
    worker.blocks.register(single_of(worker).block_table[1], b"of another")


def decode_before_all_is_computed(worker: WorkerState) -> None:
    waiting = next(sequence for sequence in worker.running if sequence.source is not None)
    waiting.is_decoding = True


def copy_to_a_host_block_that_nobody_holds(worker: WorkerState) -> None:
    worker.unsent_swap_out += [0, 19]


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        lose_a_host_block,
        lose_a_seat,
        share_a_block_that_is_written,
        read_a_block_that_is_written,
        find_a_block_that_is_written,
        decode_before_all_is_computed,
        copy_to_a_host_block_that_nobody_holds,
    ],
)
def test_what_a_worker_loses_or_holds_twice_is_noticed(damage: Callable[[WorkerState], None]) -> None:
    worker = full_worker()
    damage(worker)
    with pytest.raises(AssertionError):
        check_worker(worker)


def test_a_group_that_waits_or_is_paused_without_a_worker_holds_nothing() -> None:
    group = make_group([1] * 6)
    check_waiting([group])
    check_paused([group])
    group.sequences[0].block_table = [0]
    for check in (check_waiting, check_paused):
        with pytest.raises(AssertionError):
            check([group])
    group.worker_id = "w"  # paused there, which the check of that worker looks after
    check_paused([group])


class Parts:
    """A scheduler with a running, a waiting and a paused group, and what its checks look at."""

    def __init__(self) -> None:
        cluster = Cluster(SchedulerConfig(watermark=0.0))
        cluster.add_worker(num_blocks=40, num_seats=1)
        self.running, self.waits, self.paused = (cluster.add_group([number] * 6, 1, 9) for number in (1, 2, 3))
        self.scheduler = cluster.scheduler
        self.scheduler.pause(self.paused, keep_on_host=False)
        cluster.step()
        self.scheduler.check()
        self.worker = self.scheduler._places.workers["w"]

    def damage(self, part: str) -> None:
        match part:
            case "worker":
                self.worker.blocks.allocate_block()
            case "places":
                self.running.state = GroupState.PARKED
            case "counts of the queue":
                self.scheduler.waiting.num_sequences += 1
            case "ranks of the queue":
                self.scheduler.waiting._ranks._lasts[0] = (9.0, 9.0)
            case "incidents":
                self.scheduler._isolation._incidents[self.paused] = Incidents()
            case "cohorts":
                self.scheduler._isolation.trials.add_suspects([self.running])
            case "fetches":
                self.worker.num_coming_fetched = 1
            case "waiting group":
                self.waits.sequences[0].block_table = [0]
            case "paused group":
                self.paused.sequences[0].block_table = [0]


@pytest.mark.parametrize(
    "part",
    [
        "worker",
        "places",
        "counts of the queue",
        "ranks of the queue",
        "incidents",
        "cohorts",
        "fetches",
        "waiting group",
        "paused group",
    ],
)
def test_every_part_is_checked(part: str) -> None:
    parts = Parts()
    parts.damage(part)
    with pytest.raises(AssertionError):
        parts.scheduler.check()
