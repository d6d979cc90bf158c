"""Requests that fail steps or end workers, through engine and wire: they fail alone, and say why."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
import structlog

from common.arrays import unpack_int32
from quire.errors import UnavailableError
from quire.v1 import inference_pb2 as pb
from quire.v1 import worker_pb2
from scheduler_svc.core.isolation import MAX_EXCUSED_LOSSES
from tests.scheduler.journal_setup import until
from tests.scheduler.refusals import refusal_of
from tests.scheduler.scripted_worker import Answer, ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in

POISON = 5000  # comes next after 4999


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


def on_poison(worker: ScriptedWorker, answer: Callable[[worker_pb2.StepRequest], Answer]) -> None:
    """Replace the answers to steps with a seat that contains, or has generated, POISON."""
    poisoned: set[int] = set()

    def script(request: worker_pb2.StepRequest) -> Answer:
        if request.snapshot:
            poisoned.clear()
        poisoned.difference_update(unpack_int32(request.freed_seats))
        for seat in request.whole:
            poisoned.discard(seat.seat)
            if POISON in unpack_int32(seat.token_ids):
                poisoned.add(seat.seat)
        return answer(request) if poisoned.intersection(unpack_int32(request.rows)) else worker.execute(request)

    worker.script = script


def failed(request: worker_pb2.StepRequest) -> worker_pb2.StepResponse:
    return worker_pb2.StepResponse(
        epoch=request.epoch, step_id=request.step_id, status=worker_pb2.STEP_STATUS_FAILED, error="poisoned"
    )


async def run_poison(site: Site) -> str:
    """Run a poisonous request; return its error, which must be in its record too."""
    refusal = await refusal_of(site.run(counting(POISON, 20, "poison")))
    record = await site.inference.GetRequest(pb.GetRequestRequest(request_id="poison"))
    assert record.state == pb.REQUEST_STATE_FAILED and record.error in (refusal.details() or "")
    return record.error


def mixed(number: int) -> pb.GenerateRequest:
    request = counting(100 * (number + 1), 20)
    if number % 4 == 3:
        request.beam.beam_width = 2
    elif number % 4 == 2:
        request.sampling.n = 3
    return request


async def test_of_twelve_requests_only_the_one_that_fails_steps_is_failed(site: Site) -> None:
    worker = await site.add_worker()
    on_poison(worker, failed)
    worker.may_answer.clear()
    running = [asyncio.create_task(site.run(mixed(number))) for number in range(11)]
    poison = asyncio.create_task(run_poison(site))
    await until(lambda: len(site.engine.live) == 12)
    with structlog.testing.capture_logs() as logs:
        worker.may_answer.set()
        assert "poisoned" in await poison
    for messages in await asyncio.gather(*running):
        assert messages[-1].finished.state == pb.REQUEST_STATE_FINISHED
    isolated = [line for line in logs if line["event"] == "request isolated"]
    assert [line["request_id"] for line in isolated] == ["poison"]
    assert worker.num_streams == 1
    await site.idle()


@pytest.mark.parametrize("lives_on", [False, True])
async def test_of_twelve_requests_only_the_one_that_ends_workers_is_failed(site: Site, lives_on: bool) -> None:
    """A link that only breaks while the process lives on is excused three times."""
    workers = [await site.add_worker(worker_id) for worker_id in ("a", "b")]

    def break_link(worker: ScriptedWorker, request: worker_pb2.StepRequest) -> Answer:
        if not lives_on:
            worker.description.incarnation += "+"
        raise UnavailableError("the process has gone", 1.0)

    for worker in workers:
        on_poison(worker, partial(break_link, worker))
        worker.may_answer.clear()
    running = [asyncio.create_task(site.run(mixed(number))) for number in range(11)]
    poison = asyncio.create_task(run_poison(site))
    await until(lambda: len(site.engine.live) == 12)
    for worker in workers:
        worker.may_answer.set()
    while not all(each.done() for each in (poison, *running)):  # who was lost comes back, at the end too
        for worker in workers:
            await site.cluster.Register(worker.registration())
        await asyncio.sleep(0.005)
    said = re.search("request crashed its worker ([0-9]) times, the last", await poison)
    assert said is not None
    num_times = int(said[1])
    assert num_times == 3 or (lives_on and num_times == 4)  # at the first that is not excused, it was not alone
    for messages in await asyncio.gather(*running):
        assert messages[-1].finished.state == pb.REQUEST_STATE_FINISHED
    num_lost = sum(worker.num_streams for worker in workers) - 2
    assert num_lost <= (num_times + MAX_EXCUSED_LOSSES if lives_on else num_times)
    await site.idle()


async def test_a_worker_that_leaves_by_itself_is_nobodys_fault(site: Site) -> None:
    """Four of them, each told to end while the only request runs there."""
    running = None
    for number in range(4):
        worker = ScriptedWorker(f"w{number}")
        worker.silence_after(2)
        await site.start_worker(worker)
        if running is None:
            running = asyncio.create_task(site.run(counting(10, 40)))
        await until(lambda worker=worker: len(worker.steps) >= 3)  # type: ignore[misc]
        await site.cluster.Register(worker.registration(draining=True))
        await worker.stop()
        await until(lambda: not site.workers.members)
    await site.add_worker("last")
    assert running is not None
    assert tokens_in(await running) == list(range(11, 51))
    await site.idle()
