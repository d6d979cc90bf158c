"""Epochs that workers name: the store says who leads, a worker's word ends no scheduler, and none is believed twice."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import structlog

from quire.v1 import cluster_pb2, worker_pb2
from quire.v1 import inference_pb2 as pb
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.store import EntryId, StoreUnavailableError
from scheduler_svc.workers.worker_loop import SupersededError
from tests.scheduler.journal_setup import until
from tests.scheduler.scripted_worker import Answer, ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in

MAX_UINT64 = 2**64 - 1


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


def refuse_for(worker: ScriptedWorker, epoch: int) -> None:
    """Make the worker answer every step of this epoch with STALE_EPOCH."""

    def script(request: worker_pb2.StepRequest) -> Answer:
        return worker_pb2.StepResponse(epoch=epoch, step_id=request.step_id, status=worker_pb2.STEP_STATUS_STALE_EPOCH)

    worker.script = script


async def reasons(site: Site) -> dict[str, str]:
    stats = await site.inference.GetStats(pb.GetStatsRequest())
    return {each.worker_id: each.out_of_service for each in stats.workers}


@pytest.mark.parametrize("epoch", [2, 7, 2**53, 2**63, MAX_UINT64])
async def test_an_epoch_that_the_store_does_not_know_puts_the_worker_out_of_service_and_ends_nobody(
    site: Site, epoch: int
) -> None:
    liar, honest = await site.add_worker("liar"), await site.add_worker("honest")
    refuse_for(liar, epoch)
    with structlog.testing.capture_logs() as logs:
        runs = await asyncio.gather(*(site.run(counting(100 * i, 20)) for i in range(8)))
        await until(lambda: len(site.workers.driven) == 1)
    for i, messages in enumerate(runs):
        assert tokens_in(messages) == list(range(100 * i + 1, 100 * i + 21))
    assert not site.fatal
    told = await reasons(site)
    assert told["honest"] == "" and f"epoch {epoch}, which the store does not know" in told["liar"]
    assert [line["worker_id"] for line in logs if line["event"] == "worker out of service"] == ["liar"]
    num_steps = len(liar.steps)
    response = await site.cluster.Register(liar.registration())
    assert response.out_of_service == told["liar"] and len(liar.steps) == num_steps
    assert len(honest.steps) > 0
    await site.idle()


async def test_a_worker_alone_that_names_an_epoch_costs_no_request_its_life(site: Site) -> None:
    worker = await site.add_worker()
    refuse_for(worker, MAX_UINT64)
    running = asyncio.create_task(site.run(counting(10)))
    await until(lambda: not site.workers.driven)
    again = ScriptedWorker("w1")
    again.description.incarnation = "w1-2"
    await site.start_worker(again)
    assert tokens_in(await running) == [11, 12, 13, 14]
    assert await reasons(site) == {"w1": ""} and not site.fatal


async def test_a_worker_out_of_service_is_taken_back_by_an_administrator(site: Site) -> None:
    worker = await site.add_worker()
    refuse_for(worker, 7)
    running = asyncio.create_task(site.run(counting(10)))
    await until(lambda: not site.workers.driven)
    worker.script = worker.execute
    await site.cluster.Register(worker.registration())
    assert not site.workers.driven
    await site.cluster.DrainWorker(cluster_pb2.DrainWorkerRequest(worker_id="w1", undo=True))
    await site.register(worker)
    assert tokens_in(await running) == [11, 12, 13, 14]


async def test_a_worker_out_of_service_that_falls_silent_is_forgotten(site: Site) -> None:
    worker = await site.add_worker()
    refuse_for(worker, 7)
    running = asyncio.create_task(site.run(counting(10)))
    await until(lambda: not site.workers.driven)
    site.workers.give_up_silent(site.workers.members["w1"].seen_s + 60)
    assert await reasons(site) == {}
    await site.cluster.Register(worker.registration())
    assert "epoch 7" in (await reasons(site))["w1"], "the same process is still out of service"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_scheduler_that_the_store_says_was_followed_ends_at_the_word_of_a_worker(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    refuse_for(worker, 7)
    running = asyncio.create_task(site.run(counting(10)))
    await until(lambda: bool(worker.steps))
    await site.store.append(EntryId(site.journal.stats.epoch + 7, 0), b"a leader's")
    worker.may_answer.set()
    await until(lambda: bool(site.fatal))
    assert isinstance(site.fatal[0], SupersededError) and "epoch 7" in site.fatal[0].message
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


class MuteStore(MemoryStore):
    """Says nothing of what is in it while it is mute."""

    is_mute = False

    async def read_entries(self, first: EntryId, limit: int, *, is_urgent: bool = False):  # type: ignore[no-untyped-def] # noqa: ANN201
        if self.is_mute:
            raise StoreUnavailableError("silent")
        return await super().read_entries(first, limit)

    async def first_entry_id(self, first: EntryId, *, is_urgent: bool = False) -> EntryId | None:
        if self.is_mute:
            raise StoreUnavailableError("silent")
        return await super().first_entry_id(first)


async def test_while_the_store_does_not_say_who_leads_nobody_ends_and_the_worker_may_come_back() -> None:
    store = MuteStore()
    async with running_site(store) as site:
        worker = await site.add_worker()
        store.is_mute = True
        refuse_for(worker, 7)
        running = asyncio.create_task(site.run(counting(10)))
        await until(lambda: not site.workers.members)
        assert not site.fatal
        worker.script = worker.execute
        await site.register(worker)
        assert tokens_in(await running) == [11, 12, 13, 14]


async def test_a_worker_that_says_it_follows_a_higher_epoch_gets_no_step_until_it_follows_ours(site: Site) -> None:
    """After a loss of the store epochs are counted anew: the worker drops the old epoch by itself."""
    worker = ScriptedWorker("w1")
    await worker.start()
    site.on_close(worker.stop)
    response = await site.cluster.Register(worker.registration(epoch=9))
    assert response.epoch == 1 and "epoch 9" in response.out_of_service
    assert "epoch 9" in (await reasons(site))["w1"] and not worker.steps
    await site.register(worker)
    assert await reasons(site) == {"w1": ""}
    assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]


async def test_steps_refused_for_a_later_epoch_of_our_own_are_sent_again(site: Site) -> None:
    worker = await site.add_worker()
    worker.silence_after(3)
    running = asyncio.create_task(site.run(counting(10, 20)))
    await until(lambda: not worker.may_answer.is_set())
    site.workers.epoch = 5
    refuse_for(worker, 5)
    await until(lambda: len(worker.steps) >= 4)
    worker.speak_again()
    assert tokens_in(await running) == list(range(11, 31))
    assert worker.num_streams == 1 and {step.epoch for step in worker.steps} == {1, 5}


@pytest.mark.parametrize("epoch", [0, 2, MAX_UINT64])
async def test_an_answer_with_another_epoch_is_not_believed(site: Site, epoch: int) -> None:
    worker = await site.add_worker()
    is_wrong = True

    def script(request: worker_pb2.StepRequest) -> Answer:
        nonlocal is_wrong
        response = worker.execute(request)
        if is_wrong:
            response.epoch, is_wrong = epoch, False
        return response

    worker.script = script
    running = asyncio.create_task(site.run(counting(10)))
    await until(lambda: not site.workers.members)
    await site.register(worker)
    assert tokens_in(await running) == [11, 12, 13, 14]
    assert worker.num_streams == 2
