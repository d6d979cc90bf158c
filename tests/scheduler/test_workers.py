"""Workers of the scheduler: registration, dialling back, identity, model, silence, replacement."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from quire.v1 import cluster_pb2, worker_pb2
from quire.v1 import inference_pb2 as pb
from scheduler_svc.workers.worker_link import WorkerLink
from scheduler_svc.workers.worker_loop import HUNG_AFTER_UNKNOWN_S
from scheduler_svc.workers.workers import LEASE_MS
from tests.scheduler.journal_setup import until
from tests.scheduler.refusals import code_of, refusal_of
from tests.scheduler.scripted_worker import Answer, ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


async def started(worker: ScriptedWorker, site: Site) -> ScriptedWorker:
    await worker.start()
    site.on_close(worker.stop)
    return worker


async def refusal(site: Site, worker: ScriptedWorker, **changes: object) -> grpc.aio.AioRpcError:
    return await refusal_of(site.cluster.Register(worker.registration(**changes)))


async def test_a_registration_without_names_says_which_are_missing(site: Site) -> None:
    error = await refusal(site, ScriptedWorker(), worker_id="", incarnation="")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    for field in ("worker_id", "address", "incarnation"):
        assert field in (error.details() or "")


async def test_an_id_held_by_a_live_worker_is_refused_and_free_once_that_is_gone(site: Site) -> None:
    first = await site.add_worker("w1")
    second = await started(ScriptedWorker("w1"), site)
    second.description.incarnation = "w1-2"
    error = await refusal(site, second)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "held by a live worker" in (error.details() or "")
    running = asyncio.create_task(site.run(counting(10, 400)))
    await until(lambda: len(first.steps) > 20)
    await first.stop()
    await until(lambda: not site.workers.members)
    await site.register(second)
    assert tokens_in(await running) == list(range(11, 411))
    await site.idle()


async def test_a_restarted_worker_replaces_one_that_was_still_being_described(site: Site) -> None:
    first = await started(ScriptedWorker("w1"), site)
    first.may_describe.clear()
    await site.cluster.Register(first.registration())
    second = await started(ScriptedWorker("w1"), site)
    second.description.incarnation = "w1-2"
    await site.register(second)
    first.may_describe.set()
    assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]
    assert (first.num_streams, second.num_streams) == (0, 1)


async def test_a_draining_worker_that_nobody_knows_is_not_dialled(site: Site) -> None:
    worker = await started(ScriptedWorker("w1"), site)
    await site.cluster.Register(worker.registration(draining=True))
    assert not site.workers.members


async def test_a_worker_that_ends_before_it_served_leaves_nobody_of_its_name_behind_unlisted(site: Site) -> None:
    first = await started(ScriptedWorker("w1"), site)
    first.may_describe.clear()
    await site.cluster.Register(first.registration())
    second = await started(ScriptedWorker("w1"), site)
    second.description.incarnation = "w1-2"
    await site.cluster.Register(second.registration(draining=True))
    first.may_describe.set()
    await site.register(first)
    assert [each.incarnation for each in site.workers.driven] == [first.description.incarnation]
    assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]
    assert first.num_streams == 1


async def test_an_address_at_which_another_worker_answers_is_not_used(site: Site) -> None:
    """Two workers that advertise one address would take each other's stream for ever."""
    right = await site.add_worker("right")
    await site.cluster.Register(ScriptedWorker("wrong").registration(address=right.address))
    await until(lambda: "wrong" not in site.workers.members)
    assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]
    assert [each.worker_id for each in site.workers.driven] == ["right"]
    assert right.num_streams == 1


async def test_of_two_models_that_come_at_once_only_one_is_served(site: Site) -> None:
    one, other = ScriptedWorker("one"), ScriptedWorker("other")
    other.description.model.fingerprint = "counting-2"
    for worker in (one, other):
        await started(worker, site)
        worker.may_describe.clear()
        await site.cluster.Register(worker.registration())
    for worker in (one, other):
        worker.may_describe.set()
    await until(lambda: len(site.workers.members) == 1 == len(site.workers.driven))
    served = await site.inference.GetModel(pb.GetModelRequest())
    assert [each.worker_id for each in site.workers.driven] == [{"counting-1": "one"}.get(served.fingerprint, "other")]
    loser = other if served.fingerprint == "counting-1" else one
    assert (await refusal(site, loser)).code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_model_may_change_when_nobody_uses_it(site: Site) -> None:
    first = await site.add_worker("first")
    await first.stop()
    await until(lambda: not site.workers.members)
    second = ScriptedWorker("second")
    second.description.model.fingerprint = "counting-2"
    await site.start_worker(second)
    assert (await site.inference.GetModel(pb.GetModelRequest())).fingerprint == "counting-2"


async def test_the_model_stays_while_a_request_waits_for_it(site: Site) -> None:
    first = await site.add_worker("first")
    first.may_answer.clear()
    running = asyncio.create_task(site.run(counting(10)))
    await until(lambda: bool(first.steps))
    await first.stop()
    await until(lambda: not site.workers.members)
    second = await started(ScriptedWorker("second"), site)
    second.description.model.fingerprint = "counting-2"
    assert (await refusal(site, second)).code() is grpc.StatusCode.FAILED_PRECONDITION
    third = await site.add_worker("third")
    assert tokens_in(await running) == [11, 12, 13, 14]
    assert third.num_streams == 1


async def test_a_worker_that_does_not_fit_beside_the_others_is_left_out(site: Site) -> None:
    await site.add_worker("first")
    odd = await started(ScriptedWorker("odd"), site)
    odd.description.pool.block_size = 32
    await site.cluster.Register(odd.registration())
    await until(lambda: "odd" not in site.workers.members)
    assert [each.worker_id for each in site.workers.driven] == ["first"]


async def test_a_worker_that_nobody_reaches_is_forgotten(site: Site) -> None:
    await site.cluster.Register(ScriptedWorker().registration(address="127.0.0.1:1"))
    await until(lambda: not site.workers.members)
    assert site.changes == []


async def test_a_worker_lost_before_its_first_answer_costs_nothing(site: Site) -> None:
    silent, other = await site.add_worker("silent"), await site.add_worker("other")
    silent.may_answer.clear()
    other.may_answer.clear()
    running = [asyncio.create_task(site.run(counting(100 * i, 8))) for i in range(6)]
    await until(lambda: bool(silent.steps and other.steps))
    await silent.stop()
    other.may_answer.set()
    for i, messages in enumerate(await asyncio.gather(*running)):
        assert tokens_in(messages) == list(range(100 * i + 1, 100 * i + 9))
    await site.idle()


async def test_a_worker_without_a_sign_of_life_is_given_up(site: Site) -> None:
    worker = await site.add_worker()
    seen_s = site.workers.members["w1"].seen_s
    site.workers.give_up_silent(seen_s + LEASE_MS / 1000 - 1)
    assert len(site.workers.driven) == 1
    site.workers.give_up_silent(seen_s + LEASE_MS / 1000 + 1)
    await until(lambda: not site.workers.members)
    assert site.changes == [True, False]
    await site.register(worker)
    assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]


async def test_the_watch_finds_a_silent_worker_by_itself(site: Site) -> None:
    await site.add_worker()
    watching = asyncio.create_task(site.workers.watch())
    site.workers.members["w1"].seen_s -= 2 * LEASE_MS / 1000
    await until(lambda: not site.workers.members)
    watching.cancel()


async def test_a_worker_that_hangs_in_a_step_is_given_up_and_another_does_its_work(site: Site) -> None:
    hung = await site.add_worker("hung")
    hung.may_answer.clear()
    before_s = time.monotonic()
    running = asyncio.create_task(site.run(counting(10)))
    await until(lambda: bool(hung.steps))
    hangs_after_s = await hanging(site, num_results=0)
    assert hangs_after_s >= before_s + HUNG_AFTER_UNKNOWN_S  # no step of it was ever measured
    await look_at(site, "hung", hangs_after_s - 0.1)
    assert site.workers.driven
    await look_at(site, "hung", hangs_after_s + 0.1)
    assert not site.workers.driven
    await until(lambda: not site.workers.members)
    await site.add_worker("other")
    assert tokens_in(await running) == [11, 12, 13, 14]
    await site.idle()


async def test_a_request_whose_steps_hang_three_times_is_failed_although_the_process_lives_on(site: Site) -> None:
    hung = await site.add_worker("hung")
    hung.may_answer.clear()
    running = asyncio.create_task(site.run(counting(10)))
    for _ in range(3):
        await site.cluster.Register(hung.registration())
        await look_at(site, "hung", await hanging(site, num_results=0) + 0.1)
        await until(lambda: not site.workers.members)
    with pytest.raises(grpc.aio.AioRpcError, match=r"crashed its worker 3 times.*it hangs in a step"):
        await running
    await site.idle()


async def hanging(site: Site, num_results: int) -> float:
    """Time after which the executing step counts as hung, once this many results of one token are known."""
    await until(lambda: site.engine.output_tokens == num_results and bool(site.workers.driven))
    loop = site.workers.driven[0].loop
    assert loop is not None
    await until(lambda: loop.hangs_after_s is not None)
    assert loop.hangs_after_s is not None
    return loop.hangs_after_s


async def look_at(site: Site, worker_id: str, now_s: float) -> None:
    """Check the workers at this time, with the worker registered until then."""
    site.workers.members[worker_id].seen_s = now_s
    site.workers.give_up_silent(now_s)
    await asyncio.sleep(0)


async def test_a_step_like_those_before_hangs_after_seconds_and_late_answers_change_nothing(site: Site) -> None:
    hung = await site.add_worker("hung")
    hung.silence_after(20)
    running = asyncio.create_task(site.run(counting(10, 40)))
    hangs_after_s = await hanging(site, num_results=20)
    assert hangs_after_s < time.monotonic() + HUNG_AFTER_UNKNOWN_S
    await look_at(site, "hung", hangs_after_s - 0.1)
    assert len(site.workers.driven) == 1
    await look_at(site, "hung", hangs_after_s + 0.1)
    await until(lambda: not site.workers.members)
    other = ScriptedWorker("other")
    other.silence_after(3)
    await site.start_worker(other)
    await until(lambda: len(other.steps) == 4)
    hung.speak_again()
    other.speak_again()
    assert tokens_in(await running) == list(range(11, 51))
    assert site.engine.output_tokens == 40
    await site.idle()


async def test_the_first_step_of_a_worker_that_is_back_hangs_after_seconds_too(site: Site) -> None:
    """A damaged length, for example, keeps a step from ever being complete."""
    worker = await site.add_worker("back")
    for start in (10, 20, 30):
        await site.run(counting(start))
    site.workers.members["back"].seen_s -= 2 * LEASE_MS / 1000
    site.workers.give_up_silent(time.monotonic())
    await until(lambda: not site.workers.members)
    await site.register(worker)
    worker.may_answer.clear()
    num_results = site.engine.output_tokens
    running = asyncio.create_task(site.run(counting(40)))
    hangs_after_s = await hanging(site, num_results)
    assert hangs_after_s < time.monotonic() + HUNG_AFTER_UNKNOWN_S  # what was measured before its loss counts
    await look_at(site, "back", hangs_after_s - 0.1)
    assert len(site.workers.driven) == 1
    await look_at(site, "back", hangs_after_s + 0.1)
    await until(lambda: not site.workers.members)
    worker.may_answer.set()
    await site.register(worker)
    assert tokens_in(await running) == [41, 42, 43, 44]
    await site.idle()


async def test_time_in_which_the_scheduler_did_not_run_hangs_nobody(site: Site) -> None:
    worker = await site.add_worker()
    worker.silence_after(20)
    running = asyncio.create_task(site.run(counting(10, 40)))
    hangs_after_s = await hanging(site, num_results=20)
    loop = site.workers.driven[0].loop
    assert loop is not None and loop.is_hung(hangs_after_s + 0.1)
    loop.excuse_pause(100.0)
    assert not loop.is_hung(hangs_after_s + 99.9)
    assert loop.is_hung(hangs_after_s + 100.1)
    worker.speak_again()
    assert tokens_in(await running) == list(range(11, 51))


async def test_an_idle_worker_hangs_in_no_step(site: Site) -> None:
    await site.add_worker()
    assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]
    await site.idle()
    loop = site.workers.driven[0].loop
    assert loop is not None and not loop.is_hung(time.monotonic() + 10 * HUNG_AFTER_UNKNOWN_S)


async def test_nobody_registers_once_the_workers_are_closed(site: Site) -> None:
    worker = await site.add_worker()
    await site.workers.close()
    assert (await refusal(site, worker)).code() is grpc.StatusCode.UNAVAILABLE
    assert not site.workers.members


async def test_statistics_show_workers_blocks_and_requests(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    running = asyncio.create_task(site.run(counting(10, 40)))
    await until(lambda: bool(worker.steps))
    stats = await site.inference.GetStats(pb.GetStatsRequest())
    assert (stats.num_running, stats.num_waiting, stats.num_admitted, stats.num_finished) == (1, 0, 1, 0)
    assert (stats.workers[0].worker_id, stats.workers[0].blocks.used, stats.journal.store) == ("w1", 1, "memory")
    worker.may_answer.set()
    await running
    await site.idle()
    stats = await site.inference.GetStats(pb.GetStatsRequest())
    assert (stats.num_running, stats.num_finished, stats.output_tokens, stats.prompt_tokens) == (0, 1, 40, 1)
    assert stats.workers[0].num_steps >= 40 and stats.workers[0].blocks.used == 0


def timed(worker: ScriptedWorker) -> None:
    """Let the worker report 1 ms for each step, and 1 µs for each swapped block."""

    def script(request: worker_pb2.StepRequest) -> Answer:
        response = worker.execute(request)
        response.swap_ns = 1_000 * ((len(request.swap_out) + len(request.swap_in)) // 8)
        response.exec_ns = 1_000_000 + response.swap_ns
        return response

    worker.script = script


def long_prompt(start: int, max_tokens: int) -> pb.GenerateRequest:
    request = counting(start, max_tokens)
    request.token_ids.ids.extend([start] * 29)
    return request


async def run_together(site: Site, worker: ScriptedWorker, starts: tuple[int, ...]) -> list[list[pb.GenerateResponse]]:
    """Requests of which none is done before all are admitted."""
    worker.may_answer.clear()
    runs = [asyncio.create_task(site.run(long_prompt(start, 50))) for start in starts]
    await until(lambda: len(site.engine.live) == len(starts))
    worker.may_answer.set()
    return await asyncio.gather(*runs)


async def test_the_speed_of_a_worker_is_learnt_swaps_are_tried_and_both_are_shown(site: Site) -> None:
    # 6 blocks of 16: each of the two needs 5 at the end.
    worker = ScriptedWorker(num_blocks=6)
    worker.description.pool.num_host_blocks = 10
    timed(worker)
    await site.start_worker(worker)
    for start in (1, 2):
        await site.run(long_prompt(start, 1))
    stats = (await site.inference.GetStats(pb.GetStatsRequest())).workers[0]
    assert stats.prefill_tokens_per_s == pytest.approx(30_000)  # 30 tokens in 1 ms
    assert (stats.swap_blocks_per_s, stats.num_swaps, stats.host_blocks) == (0.0, 0, 10)
    for start, messages in zip((100, 200), await run_together(site, worker, (100, 200)), strict=True):
        assert tokens_in(messages) == list(range(start + 1, start + 51))
    stats = (await site.inference.GetStats(pb.GetStatsRequest())).workers[0]
    assert stats.swap_blocks_per_s == pytest.approx(1e6)
    assert stats.num_swaps == stats.num_preemptions > 0 == stats.recomputed_tokens
    assert stats.swapped_out_blocks == stats.swapped_in_blocks >= 3
    assert stats.used_host_blocks == 0
    assert any(request.swap_out for request in worker.steps) and any(request.swap_in for request in worker.steps)
    await site.idle()


async def test_a_worker_without_a_host_pool_recomputes(site: Site) -> None:
    worker = ScriptedWorker(num_blocks=6)
    timed(worker)
    await site.start_worker(worker)
    for start in (1, 2):
        await site.run(long_prompt(start, 1))
    await run_together(site, worker, (100, 200))
    stats = (await site.inference.GetStats(pb.GetStatsRequest())).workers[0]
    assert stats.num_swaps == stats.host_blocks == 0 < stats.num_preemptions
    assert stats.recomputed_tokens > 0
    await site.idle()


async def test_block_statistics_add_up(site: Site) -> None:
    worker = await site.add_worker()
    worker.may_answer.clear()
    running = asyncio.create_task(site.run(long_prompt(10, 40)))
    await until(lambda: bool(worker.steps))
    blocks = (await site.inference.GetStats(pb.GetStatsRequest())).workers[0].blocks
    assert blocks.free + blocks.cached + blocks.used == blocks.total == 64
    slots = blocks.filled_slots + blocks.reserved_slots + blocks.fragmented_slots
    assert slots == blocks.used * blocks.block_size > 0
    assert (blocks.sequence_blocks, blocks.saved, blocks.shared, blocks.pinned) == (blocks.used, 0, 0, 0)
    worker.may_answer.set()
    await running
    await site.idle()


async def drain(site: Site, worker_id: str, *, undo: bool = False) -> int:
    response = await site.cluster.DrainWorker(cluster_pb2.DrainWorkerRequest(worker_id=worker_id, undo=undo))
    return response.num_running


async def test_a_drained_worker_gets_nothing_until_it_is_taken_back(site: Site) -> None:
    drained, other = await site.add_worker("drained"), await site.add_worker("other")
    for worker in (drained, other):
        worker.silence_after(5)
    running = [asyncio.create_task(site.run(counting(100 * i, 30))) for i in range(6)]
    await until(lambda: len(drained.steps) == 6 and len(other.steps) == 6)
    assert await drain(site, "drained") > 0  # tokens in flight are still to come
    for worker in (drained, other):
        worker.speak_again()
    for i, messages in enumerate(await asyncio.gather(*running)):
        assert tokens_in(messages) == list(range(100 * i + 1, 100 * i + 31))
    assert await drain(site, "drained") == 0 and len(drained.steps) == 7
    stats = await site.inference.GetStats(pb.GetStatsRequest())
    assert {each.worker_id: each.draining for each in stats.workers} == {"drained": True, "other": False}
    await other.stop()
    await until(lambda: len(site.workers.members) == 1)
    waiting = asyncio.create_task(site.run(counting(10, 3)))
    await until(lambda: site.engine.scheduler.waiting.num_groups == 1)
    await drain(site, "drained", undo=True)
    assert tokens_in(await waiting) == [11, 12, 13]
    await site.idle()


async def test_the_service_is_ready_while_a_worker_takes_new_requests(site: Site) -> None:
    await site.add_worker("w1")
    await drain(site, "w1")
    assert site.changes == [True, False]  # what comes now waits for a worker
    await drain(site, "w1", undo=True)
    assert site.changes[2:] == [True]
    await drain(site, "w1")
    leaving = await site.add_worker("w2")
    assert site.changes[3:] == [False, True]
    await site.cluster.Register(leaving.registration(draining=True))
    assert site.changes[5:] == [False]


async def test_only_workers_that_are_here_and_stay_can_be_drained_and_taken_back(site: Site) -> None:
    worker = await site.add_worker()
    assert await code_of(drain(site, "w2")) is grpc.StatusCode.NOT_FOUND
    await site.cluster.Register(worker.registration(draining=True))
    assert await code_of(drain(site, "w1", undo=True)) is grpc.StatusCode.FAILED_PRECONDITION
    assert await drain(site, "w1") == 0


async def test_a_drained_worker_whose_link_broke_comes_back_drained_and_a_new_one_serves(site: Site) -> None:
    worker = await site.add_worker()
    await drain(site, "w1")
    for incarnation, is_draining in ((worker.description.incarnation, True), ("started anew", False)):
        site.workers.give_up_silent(time.monotonic() + LEASE_MS / 1000 + 1)
        await until(lambda: not site.workers.members)
        worker.description.incarnation = incarnation
        await site.register(worker)
        stats = await site.inference.GetStats(pb.GetStatsRequest())
        assert [each.draining for each in stats.workers] == [is_draining]
    await drain(site, "w1")
    await drain(site, "w1", undo=True)
    site.workers.give_up_silent(time.monotonic() + LEASE_MS / 1000 + 1)
    await until(lambda: not site.workers.members)
    await site.register(worker)
    assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]


async def test_a_queue_that_waits_for_a_worker_to_come_back_foresees_no_wait_for_those_that_come(site: Site) -> None:
    """Regression: the time without a worker counted as time in which nobody was served, and newcomers were refused."""
    worker = await site.add_worker()
    waits = site.engine.waits
    waits.queue_wait.record_step(time.monotonic() - 1000.0, num_served=0, num_waiting=9)
    assert waits.expected_s(5) > 1000.0
    await worker.stop()
    await until(lambda: not site.workers.driven)
    assert waits.expected_s(5) == 0.0


class SlowLink(WorkerLink):
    """Takes its time to close."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.is_closing = asyncio.Event()
        self.may_close = asyncio.Event()

    async def close(self) -> None:
        self.is_closing.set()
        await self.may_close.wait()
        await super().close()


def slow_links() -> tuple[list[SlowLink], Callable[[str], SlowLink]]:
    """Return the links that have been made, and what makes the next one."""
    links: list[SlowLink] = []

    def make_link(address: str) -> SlowLink:
        links.append(SlowLink(address))
        return links[-1]

    return links, make_link


async def test_a_worker_is_given_up_once_and_cleared_away_whatever_time_it_takes() -> None:
    links, make_link = slow_links()
    async with running_site(make_link=make_link) as site:
        worker = await site.add_worker()
        late_s = time.monotonic() + LEASE_MS / 1000 + 1
        site.workers.give_up_silent(late_s)
        await links[0].is_closing.wait()
        site.workers.give_up_silent(late_s)
        links[0].may_close.set()
        await until(lambda: not site.workers.members)
        await site.register(worker)
        assert tokens_in(await site.run(counting(10))) == [11, 12, 13, 14]
        links[1].may_close.set()


async def test_a_worker_that_is_put_out_of_service_while_its_link_closes_serves_again_once_it_is_undrained() -> None:
    """Regression: the closing was broken off, and the worker counted as being driven for good."""
    links, make_link = slow_links()
    async with running_site(make_link=make_link) as site:
        worker = await site.add_worker()
        worker.script = lambda request: b"no answer"
        running = asyncio.create_task(site.run(counting(10)))
        await links[0].is_closing.wait()
        worker.script = worker.execute
        member = site.workers.members["w1"]
        assert member.task is not None
        driving = member.task
        site.engine.on_worker_at_fault("w1")  # another worker has computed the same request
        links[0].may_close.set()
        await asyncio.wait([driving])
        assert member.task is None
        assert "could not be believed" in (await site.cluster.Register(worker.registration())).out_of_service
        await drain(site, "w1", undo=True)
        await site.register(worker)
        assert tokens_in(await running) == [11, 12, 13, 14]
        links[1].may_close.set()
