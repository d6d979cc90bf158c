"""Decisions as late as they can be: a newcomer is in the step behind the one that runs, on a CPU by default."""

import asyncio

import pytest

from common.arrays import unpack_int32
from common.step import Step
from quire.v1 import worker_pb2
from scheduler_svc.workers.decision_time import MIN_REMEMBERED
from scheduler_svc.workers.worker_link import WorkerLink
from tests.scheduler.journal_setup import until
from tests.scheduler.scripted_worker import Answer, ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in

NUM_STEPS = MIN_REMEMBERED + 3  # a prompt, and enough of decoding for the next step to be foreseen
HOUR_NS = 3_600_000_000_000


class CountingLink(WorkerLink):
    """Knows how many steps have left."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.num_sent = 0

    async def send(self, step: Step) -> None:
        self.num_sent += 1
        await super().send(step)


async def slow_worker(site: Site, device: str) -> ScriptedWorker:
    """A worker that says that each step took an hour, and keeps its last one of NUM_STEPS."""
    worker = ScriptedWorker()
    worker.description.device = device

    def script(request: worker_pb2.StepRequest) -> Answer:
        if len(worker.steps) == NUM_STEPS:
            worker.may_answer.clear()
        response = worker.execute(request)
        response.exec_ns = response.queue_ns = HOUR_NS
        return response

    worker.script = script
    await site.start_worker(worker)
    return worker


@pytest.mark.parametrize(("device", "is_late"), [("cpu", True), ("cuda:0", False)])
async def test_a_newcomer_is_in_the_step_behind_the_one_that_runs(device: str, is_late: bool) -> None:
    """The worker says that each step took an hour, so that the next one is never due by its time alone."""
    links: list[CountingLink] = []

    def make_link(address: str) -> WorkerLink:
        links.append(CountingLink(address))
        return links[-1]

    async with running_site(make_link=make_link) as site:
        worker = await slow_worker(site, device)
        first = asyncio.create_task(site.run(counting(10, 40)))
        await until(lambda: len(worker.steps) == NUM_STEPS and links[-1].num_sent == NUM_STEPS + (not is_late))
        second = asyncio.create_task(site.run(counting(100, 2)))
        await until(lambda: site.engine.scheduler.waiting.num_groups == 1)
        worker.may_answer.set()
        assert tokens_in(await second) == [101, 102]
        assert tokens_in(await first) == list(range(11, 51))
        num_rows = [len(unpack_int32(step.rows)) for step in worker.steps[NUM_STEPS : NUM_STEPS + 2]]
        assert num_rows == ([2, 2] if is_late else [1, 2])
        await site.idle()


async def test_a_fetch_that_has_begun_does_not_wait_for_the_next_decision() -> None:
    carried: list[str] = []
    async with running_site() as site:
        worker = await slow_worker(site, "cpu")
        running = asyncio.create_task(site.run(counting(10, 40)))
        await until(lambda: len(worker.steps) == NUM_STEPS)
        loop = site.workers.members["w1"].loop
        assert loop is not None
        await until(lambda: loop._is_delaying)
        loop._carry_started = lambda: carried.append("carried")
        site.engine.wake_workers()
        await until(lambda: bool(carried))
        assert loop._is_delaying, "no step was decided for that"
        worker.may_answer.set()
        assert tokens_in(await running) == list(range(11, 51))
        await site.idle()
