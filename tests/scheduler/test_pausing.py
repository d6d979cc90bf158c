"""Requests that are paused and resumed: what clients see, what is durable, and what goes on counting meanwhile."""

import asyncio
import random
from collections.abc import AsyncIterator

import grpc
import pytest

from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.memory_store import MemoryStore
from tests.patience import patient
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import entries_of, until
from tests.scheduler.mortal_sites import Client, Lives, SlowStore, lives_on, run_through_deaths, speaking_worker
from tests.scheduler.refusals import code_of, refusal_of
from tests.scheduler.sample_outputs import record_of
from tests.scheduler.scripted_beams import of_kind
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in

LONG = 200  # tokens


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


async def pause(site: Site, request_id: str, keep: pb.PauseKeep.ValueType = pb.PAUSE_KEEP_AUTO) -> None:
    response = await site.inference.Pause(pb.PauseRequest(request_id=request_id, keep=keep))
    assert response.state == pb.REQUEST_STATE_PAUSED


async def resume(site: Site, request_id: str) -> pb.RequestState.ValueType:
    return (await site.inference.Resume(pb.ResumeRequest(request_id=request_id))).state


async def state_of(site: Site, request_id: str) -> pb.RequestState.ValueType:
    return (await record_of(site, request_id)).state


async def started(
    site: Site, worker: ScriptedWorker, request: pb.GenerateRequest
) -> "asyncio.Task[list[pb.GenerateResponse]]":
    """Reads a request, of which some output is there; the worker answers nothing more."""

    def has_output() -> bool:
        live = site.engine.live.get(request.request_id)
        return live is not None and live.stream.samples[0].num_released > 0

    worker.silence_once(has_output)
    worker.may_answer.set()
    reading = asyncio.create_task(site.run(request))
    await until(lambda: not worker.may_answer.is_set())
    return reading


def num_used_blocks(site: Site) -> int:
    return sum(each.num_used_blocks for each in site.engine.scheduler.stats().workers)


async def test_a_paused_request_frees_its_blocks_and_goes_on_exactly_while_its_reader_waits(site: Site) -> None:
    worker = await site.add_worker()
    reading = await started(site, worker, counting(10, LONG, "long"))
    await pause(site, "long")
    worker.may_answer.set()
    await until(lambda: num_used_blocks(site) == 0)
    assert await state_of(site, "long") == pb.REQUEST_STATE_PAUSED
    stats = site.stats()
    assert (stats.num_paused, stats.num_waiting, stats.num_running) == (1, 0, 0)
    await pause(site, "long", pb.PAUSE_KEEP_TOKENS)
    assert tokens_in(await site.run(counting(20, 3))) == [21, 22, 23], "others go on"
    assert not reading.done()
    await resume(site, "long")
    assert await resume(site, "long") in (pb.REQUEST_STATE_RUNNING, pb.REQUEST_STATE_WAITING)
    messages = await reading
    assert tokens_in(messages) == list(range(11, 11 + LONG))
    assert messages[-1].finished.usage.num_preemptions == 0
    assert messages[-1].finished.usage.cached_tokens == 0
    await site.idle()
    assert site.stats().num_paused == 0


async def test_pause_and_resume_answer_once_they_are_durable() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        worker = await site.add_worker()
        reading = await started(site, worker, counting(10, LONG, "long"))
        await pause(site, "long")
        store.may_append.clear()
        resuming = asyncio.create_task(resume(site, "long"))
        await until(lambda: not site.engine.live["long"].group.is_paused)
        pausing = asyncio.create_task(pause(site, "long"))
        await until(lambda: site.engine.live["long"].group.is_paused)
        assert not resuming.done() and not pausing.done()
        store.may_append.set()
        await asyncio.gather(resuming, pausing)
        changes = [each.paused for _, entry in await entries_of(store) for each in entry.pauses]
        assert changes == [True, False, True]
        await site.inference.Cancel(pb.CancelRequest(request_id="long"))
        assert await code_of(reading) is grpc.StatusCode.CANCELLED
        worker.may_answer.set()


async def test_a_pause_that_the_store_does_not_take_in_time_is_said_to_be_unsure() -> None:
    store = GatedStore()
    async with running_site(store, admission_timeout_s=0.05) as site:
        worker = await site.add_worker()
        reading = await started(site, worker, counting(10, LONG, "long"))
        store.may_append.clear()
        error = await refusal_of(pause(site, "long"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        store.may_append.set()
        await pause(site, "long")
        await resume(site, "long")
        worker.may_answer.set()
        assert tokens_in(await reading) == list(range(11, 11 + LONG))


async def test_what_is_unknown_or_has_ended_is_not_paused(site: Site) -> None:
    await site.add_worker()
    await site.run(counting(10, 3, "ended"))
    for call in (pause, resume):
        assert await code_of(call(site, "nobody")) is grpc.StatusCode.NOT_FOUND
        assert await code_of(call(site, "ended")) is grpc.StatusCode.FAILED_PRECONDITION
    bad = pb.PauseRequest(request_id="ended")
    bad.keep = 17  # type: ignore[assignment]  # what a later version may send
    assert await code_of(site.inference.Pause(bad)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_that_waits_may_be_paused_and_does_not_count_in_the_queue() -> None:
    async with running_site(max_queue_requests=1) as site:
        worker = await site.add_worker(num_seats=1)
        running = await started(site, worker, counting(10, LONG, "running"))
        waiting = asyncio.create_task(site.run(counting(20, 3, "waiting")))
        await until(lambda: site.engine.scheduler.waiting.num_groups == 1)
        assert await code_of(site.run(counting(30, 3))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await pause(site, "waiting")
        third = asyncio.create_task(site.run(counting(30, 3, "third")))
        await until(lambda: site.engine.scheduler.waiting.num_groups == 1)
        worker.may_answer.set()
        assert tokens_in(await running) == list(range(11, 11 + LONG))
        assert tokens_in(await third) == [31, 32, 33]
        assert await state_of(site, "waiting") == pb.REQUEST_STATE_PAUSED
        await resume(site, "waiting")
        assert tokens_in(await waiting) == [21, 22, 23]
        await site.idle()


async def test_a_paused_request_is_cancelled_expires_and_is_abandoned_as_any_other() -> None:
    async with running_site(grace_s=0.05) as site:
        worker = await site.add_worker()
        late = await started(site, worker, counting(10, LONG, "late", timeout_ms=round(1000 * patient(1.5))))
        await pause(site, "late")
        cancelled = await started(site, worker, counting(10, LONG, "cancelled"))
        abandoned = await started(site, worker, counting(10, LONG, "abandoned"))
        for request_id in ("cancelled", "abandoned"):
            await pause(site, request_id)
        worker.may_answer.set()
        await site.inference.Cancel(pb.CancelRequest(request_id="cancelled"))
        abandoned.cancel()
        assert await code_of(cancelled) is grpc.StatusCode.CANCELLED
        assert await code_of(late) is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not site.engine.live)
        assert await state_of(site, "abandoned") == pb.REQUEST_STATE_CANCELLED
        await site.idle()


async def test_nobody_who_shuts_down_waits_for_paused_requests(site: Site) -> None:
    worker = await site.add_worker()
    first, second = [await started(site, worker, counting(10, LONG, each)) for each in ("first", "second")]
    await pause(site, "first")
    empty = asyncio.create_task(site.engine.wait_until_empty())
    await site.inference.Cancel(pb.CancelRequest(request_id="second"))
    await until(empty.done)
    assert "first" in site.engine.live
    await resume(site, "first")
    empty = asyncio.create_task(site.engine.wait_until_empty())
    await asyncio.sleep(0)
    assert not empty.done()
    await pause(site, "first")
    await until(empty.done)
    await site.inference.Cancel(pb.CancelRequest(request_id="first"))
    for reading in (first, second):
        assert await code_of(reading) is grpc.StatusCode.CANCELLED
    worker.may_answer.set()


@pytest.fixture
async def lives() -> AsyncIterator[Lives]:
    async with lives_on(MemoryStore()) as made:
        yield made


def lasting(request_id: str, max_tokens: int) -> pb.GenerateRequest:
    return counting(10, max_tokens, request_id, on_disconnect=pb.ON_DISCONNECT_CONTINUE)


async def test_a_paused_request_is_paused_again_after_the_schedulers_death(lives: Lives) -> None:
    site = await lives.begin()
    await lives.add_workers()
    clients = [Client(lasting(f"r{i}", LONG)) for i in range(3)]
    lives.workers[0].silence_once(lambda: all(client.seen.samples for client in clients))
    for client in clients:
        await client.come(site)
    await until(lambda: not lives.workers[0].may_answer.is_set())
    await pause(site, "r0")
    await pause(site, "r1")
    await resume(site, "r1")
    await lives.die()
    lives.workers[0].may_answer.set()
    site = await lives.begin()
    assert await state_of(site, "r0") == pb.REQUEST_STATE_PAUSED
    assert await state_of(site, "r1") == pb.REQUEST_STATE_WAITING
    assert site.stats().num_paused == 1
    coming = [asyncio.create_task(client.come(site)) for client in clients]
    await lives.add_workers()
    await asyncio.gather(*coming)
    await until(lambda: clients[1].is_done and clients[2].is_done)
    assert await state_of(site, "r0") == pb.REQUEST_STATE_PAUSED
    assert not clients[0].is_done and num_used_blocks(site) == 0
    assert site.stats().num_paused == 1
    restated = journal_pb2.JournalEntry()
    site.engine.live["r0"].restate(restated)
    assert restated.restatements[0].pause.paused, "the next one knows it, too"
    await resume(site, "r0")
    await until(lambda: clients[0].is_done)
    for client in clients:
        assert client.seen.token_ids == [list(range(11, 11 + LONG))]
    await site.idle()


async def test_a_request_is_paused_and_resumed_while_its_model_is_not_known(lives: Lives) -> None:
    site = await lives.begin()
    await lives.add_workers()
    clients = [Client(lasting(f"r{i}", LONG)) for i in range(2)]
    lives.workers[0].may_answer.clear()
    for client in clients:
        await client.come(site)
    await pause(site, "r1")
    await lives.die()
    lives.workers[0].may_answer.set()
    site = await lives.begin()
    await pause(site, "r0")
    assert await resume(site, "r1") == pb.REQUEST_STATE_WAITING
    await lives.die()
    site = await lives.begin()
    assert await state_of(site, "r0") == pb.REQUEST_STATE_PAUSED
    coming = [asyncio.create_task(client.come(site)) for client in clients]
    await lives.add_workers()
    await asyncio.gather(*coming)
    await until(lambda: clients[1].is_done)
    assert not clients[0].is_done
    await site.inference.Cancel(pb.CancelRequest(request_id="r0"))
    await until(lambda: clients[0].is_done)
    assert await code_of(pause(site, "r0")) is grpc.StatusCode.FAILED_PRECONDITION
    await site.idle()


@pytest.mark.parametrize("seed", [1, 2])
async def test_requests_of_every_kind_paused_at_any_moment_and_through_deaths_end_as_if_undisturbed(seed: int) -> None:
    random_ = random.Random(seed)
    requests = [of_kind(i % 5, 10 * i, random_.randrange(5, 60), f"r{i}", random_) for i in range(20)]
    for request in requests:
        request.on_disconnect = pb.ON_DISCONNECT_CONTINUE
    outputs = []
    for deaths in ([], [random_.randrange(5, 30) for _ in range(3)]):
        lives = PausingLives(SlowStore(random_), random_) if deaths else Lives(SlowStore(random_))
        lives.workers.append(speaking_worker())
        clients = [Client(request) for request in requests]
        try:
            await run_through_deaths(lives, clients, deaths)
            await lives.site.idle()
        finally:
            await lives.close()
        if isinstance(lives, PausingLives):
            # Once in each life that dies: the first turn of the loop with a request pauses it, whatever the store takes
            # from then on. How often there is time for more is the machine's; mostly it is dozens.
            assert lives.num_paused >= len(deaths)
        outputs.append([[(s.token_ids, s.text, s.finish) for s in client.seen.samples] for client in clients])
    assert outputs[0] == outputs[1]


class PausingLives(Lives):
    """Lives whose requests are paused and resumed all the time."""

    def __init__(self, store: SlowStore, random_: random.Random) -> None:
        super().__init__(store)
        self.num_paused = 0
        self._random = random_
        self._pausing: asyncio.Task[None] | None = None

    async def begin(self) -> Site:
        site = await super().begin()
        self._pausing = asyncio.create_task(self._pause_and_resume(site))
        return site

    async def die(self) -> None:
        await self._stop()
        await super().die()

    async def close(self) -> None:
        await self._stop()
        await super().close()

    async def _stop(self) -> None:
        assert self._pausing is not None
        self._pausing.cancel()
        await asyncio.gather(self._pausing, return_exceptions=True)

    async def _pause_and_resume(self, site: Site) -> None:
        """Pause or resume a random request at a random moment, both equally likely."""
        while True:
            requests = [each for each in site.engine.live.values() if each.ended_state is None]
            if requests:
                request = self._random.choice(requests)
                if request.group.is_paused:
                    await site.engine.resume(request)
                else:
                    self.num_paused += 1
                    await site.engine.pause(request, keep_on_host=self._random.random() < 0.5)
            await asyncio.sleep(0)


async def test_who_shuts_down_waits_for_the_end_of_a_paused_request_to_be_durable() -> None:
    store = GatedStore()
    async with running_site(store) as site:
        worker = await site.add_worker()
        reading = await started(site, worker, counting(10, LONG, "long"))
        await pause(site, "long")
        await asyncio.wait_for(site.engine.wait_until_empty(), patient(5))
        store.may_append.clear()
        site.engine.end(site.engine.live["long"], pb.REQUEST_STATE_CANCELLED)
        empty = asyncio.create_task(site.engine.wait_until_empty())
        await until(lambda: store.num_waiting > 0)
        assert not empty.done()
        store.may_append.set()
        await until(empty.done)
        assert await code_of(reading) is grpc.StatusCode.CANCELLED
        worker.may_answer.set()
