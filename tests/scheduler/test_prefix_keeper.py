"""Pins over the life of workers: first uses, eviction, loss, replacement, and memory that requests need more."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from structlog.testing import capture_logs

from quire.v1 import inference_pb2 as pb
from quire.v1 import worker_pb2
from scheduler_svc.core.isolation import MAX_FAILED_STEPS
from scheduler_svc.core.pins import PinRefusedError
from scheduler_svc.requests.prefixes.prefix_keeper import MAX_ATTEMPTS
from scheduler_svc.requests.prefixes.prefix_pin import PrefixPin
from tests.scheduler.journal_setup import until
from tests.scheduler.pinning import (
    PREFIX,
    beginning,
    blocks_of,
    cached_tokens,
    num_computed,
    num_pinned_blocks,
    pin,
    pin_request,
    pinned,
    refusal,
    unpin,
)
from tests.scheduler.refusals import retry_delay_s
from tests.scheduler.scripted_worker import Answer, ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in

LONG_S = 600.0


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


def prefix_of(site: Site, name: str = "system") -> PrefixPin:
    prefix = site.keeper.find("", name)
    assert prefix is not None
    return prefix


def silence(request: worker_pb2.StepRequest) -> Answer:
    return None


def workers_of(site: Site, name: str = "system") -> set[str]:
    return prefix_of(site, name).worker_ids


async def lose(site: Site, worker: ScriptedWorker) -> None:
    """Kills it, and waits until that is known."""
    await worker.stop()
    await until(lambda: worker.description.worker_id not in site.workers.members)


async def replace(site: Site, worker: ScriptedWorker, change: Callable[[ScriptedWorker], None] | None = None) -> None:
    """Kills it; another process with its name comes."""
    await lose(site, worker)
    follower = ScriptedWorker(worker.description.worker_id, num_blocks=worker.description.pool.num_blocks)
    follower.description.incarnation = "another"
    if change is not None:
        change(follower)
    await site.start_worker(follower)


async def busy(site: Site, worker: ScriptedWorker) -> "asyncio.Task[list[pb.GenerateResponse]]":
    """The only worker is given a request that takes all of its seats, and does not answer until it is told to."""
    worker.may_answer.clear()
    num_steps = len(worker.steps)
    request = counting(10, 40)
    request.sampling.n = worker.description.num_seats
    running = asyncio.create_task(site.run(request))
    await until(lambda: len(worker.steps) > num_steps)
    return running


async def test_what_is_pinned_stays_when_other_prefixes_are_evicted(site: Site) -> None:
    await site.add_worker(num_blocks=20)
    await pin(site, PREFIX)
    other = blocks_of(2)
    assert await cached_tokens(site, beginning(other)) == 0
    assert await cached_tokens(site, beginning(other)) == 32
    await site.run(beginning(blocks_of(17, 20_000)))  # all that is left
    assert await cached_tokens(site, beginning(other)) == 0
    assert await cached_tokens(site, beginning(PREFIX)) == 32
    await unpin(site)
    await site.run(beginning(blocks_of(19, 30_000)))
    assert await cached_tokens(site, beginning(PREFIX)) == 0


@pytest.mark.parametrize("kind", ["one", "samples", "beams"])
async def test_another_worker_pins_a_prefix_at_its_first_use_there(site: Site, kind: str) -> None:
    first = await site.add_worker("w1", num_seats=3)
    await pin(site)
    running = await busy(site, first)
    second = await site.add_worker("w2")
    request = beginning(PREFIX, 2)
    if kind == "samples":
        request.sampling.n = 3
    elif kind == "beams":
        request.beam.beam_width = 3
    assert await cached_tokens(site, counting(20)) == 0
    assert workers_of(site) == {"w1"}  # that was no use of it
    computed_before = num_computed(second)
    assert await cached_tokens(site, request) == 0
    assert num_computed(second) - computed_before >= 41  # the whole prompt, by the request itself
    assert await pinned(site) == {"system": ["w1", "w2"]}
    assert num_pinned_blocks(site) == {"w1": 2, "w2": 2}
    assert await cached_tokens(site, beginning(PREFIX)) == 32
    first.may_answer.set()
    await running
    await unpin(site)
    assert num_pinned_blocks(site) == {"w1": 0, "w2": 0}
    await site.idle()


async def test_a_first_use_whose_memory_is_promised_is_followed_by_another(site: Site) -> None:
    first = await site.add_worker("w1", num_seats=1)
    await pin(site, blocks_of(3))
    running = await busy(site, first)
    second = await site.add_worker("w2", num_blocks=20)
    greedy = beginning(blocks_of(3), 16 * 15 - 2)  # 18 blocks, of which a pin would leave 17
    assert await cached_tokens(site, greedy) == 0
    assert workers_of(site) == {"w1"}
    assert await cached_tokens(site, beginning(blocks_of(3))) == 48  # not yet evicted, and now it is pinned
    assert workers_of(site) == {"w1", "w2"}
    first.may_answer.set()
    await running
    assert second.num_streams == 1
    await site.idle()


async def test_a_prefix_that_no_worker_has_any_more_is_computed_when_one_comes(site: Site) -> None:
    worker = await site.add_worker()
    await pin(site)
    await pin(site, blocks_of(4), "second", tenant="acme")
    await lose(site, worker)
    assert (await pinned(site), await pinned(site, "acme")) == ({"system": []}, {"second": []})
    await site.idle()
    follower = ScriptedWorker("w2")
    await site.start_worker(follower)
    await until(lambda: num_pinned_blocks(site) == {"w2": 6})
    assert num_computed(follower) == 96
    assert (await pinned(site), await pinned(site, "acme")) == ({"system": ["w2"]}, {"second": ["w2"]})
    assert await cached_tokens(site, beginning(PREFIX)) == 32
    assert not (await pin(site)).created


async def test_a_worker_that_is_back_has_none_of_its_pins_until_they_are_computed(site: Site) -> None:
    worker = await site.add_worker()
    await pin(site)
    gate: list[ScriptedWorker] = []

    def hold(follower: ScriptedWorker) -> None:
        follower.may_answer.clear()
        gate.append(follower)

    await replace(site, worker, hold)
    assert await pinned(site) == {"system": []}
    again = asyncio.create_task(pin(site))  # waits for what is being computed
    await until(lambda: bool(prefix_of(site).waiters))
    gate[0].may_answer.set()
    answer = await again
    assert (answer.created, list(answer.prefix.worker_ids)) == (False, ["w1"])
    assert num_computed(gate[0]) == 32


async def test_the_other_worker_computes_what_is_lost_with_the_first(site: Site) -> None:
    first = await site.add_worker("w1")
    await pin(site)
    second = await site.add_worker("w2")
    await lose(site, first)
    await until(lambda: workers_of(site) == {"w2"})
    assert num_computed(second) == 32


async def test_what_another_worker_still_has_is_not_computed_again(site: Site) -> None:
    first = await site.add_worker("w1", num_seats=1)
    await pin(site)
    running = await busy(site, first)
    second = await site.add_worker("w2")
    await cached_tokens(site, beginning(PREFIX))
    assert workers_of(site) == {"w1", "w2"}
    computed_before = num_computed(second)
    await lose(site, first)
    assert tokens_in(await running) == list(range(11, 51))
    assert workers_of(site) == {"w2"}
    assert num_computed(second) - computed_before <= 1 + 40  # the request that moved there


async def test_a_request_that_computes_a_lost_prefix_first_is_enough(site: Site) -> None:
    worker = await site.add_worker()
    await pin(site)
    worker.may_answer.clear()
    running = asyncio.create_task(site.run(beginning(PREFIX, 30)))
    await until(lambda: bool(site.engine.live))
    gate: list[ScriptedWorker] = []

    def narrow(follower: ScriptedWorker) -> None:
        follower.description.num_seats = 1  # the request came first, so the computation waits
        gate.append(follower)

    await replace(site, worker, narrow)
    assert tokens_in(await running) == list(range(70_001, 70_031))
    assert workers_of(site) == {"w1"}
    await site.idle()
    assert num_computed(gate[0]) == 41 + 29  # of the prefix nothing a second time


async def test_a_computation_moves_to_the_worker_that_is_left(site: Site) -> None:
    first = await site.add_worker("w1")
    first.script = silence
    asking = asyncio.create_task(pin(site))
    await until(lambda: len(first.steps) == 1)
    await site.add_worker("w2")
    await lose(site, first)
    answer = await asking
    assert (answer.created, list(answer.prefix.worker_ids)) == (True, ["w2"])


async def test_a_computation_waits_for_the_next_worker_when_none_is_left(site: Site) -> None:
    worker = await site.add_worker()
    worker.script = silence
    asking = asyncio.create_task(pin(site))
    await until(lambda: len(worker.steps) == 1)
    await replace(site, worker)
    assert (await asking).created
    await site.idle()


async def test_a_lost_prefix_comes_back_once_requests_leave_it_room(site: Site) -> None:
    worker = await site.add_worker(num_blocks=20)
    await pin(site, blocks_of(3))
    worker.may_answer.clear()
    running = asyncio.create_task(site.run(counting(10, 270)))  # 271 tokens: 17 blocks, beside 3
    await until(lambda: bool(site.engine.live))
    gate: list[ScriptedWorker] = []

    def shrink(follower: ScriptedWorker) -> None:
        follower.description.pool.num_blocks = 18
        gate.append(follower)

    await replace(site, worker, shrink)
    await until(lambda: prefix_of(site, "system").is_missed or not site.engine.live)
    assert site.engine.live and num_pinned_blocks(site) == {"w1": 0}
    code, message = await refusal(site, pin_request(blocks_of(3)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "accepted" in message
    assert tokens_in(await running) == list(range(11, 281))
    await until(lambda: workers_of(site) == {"w1"})
    assert not prefix_of(site).is_missed
    await site.idle()


async def test_a_lost_prefix_that_had_no_room_is_computed_as_soon_as_a_larger_worker_comes() -> None:
    async with running_site(pin_retry_s=LONG_S) as site:
        small = await site.add_worker("w1", num_blocks=20)
        await pin(site, blocks_of(3))
        small.may_answer.clear()
        running = asyncio.create_task(site.run(counting(10, 270)))  # 271 tokens: 17 blocks, beside 3
        await until(lambda: bool(site.engine.live))
        await lose(site, small)
        smaller = await site.add_worker("w2", num_blocks=18)
        await until(lambda: prefix_of(site).is_missed or not site.engine.live)
        smaller.may_answer.clear()
        assert site.engine.live and not workers_of(site)
        await lose(site, smaller)
        await site.add_worker("w3")
        await until(lambda: workers_of(site) == {"w3"})
        assert tokens_in(await running) == list(range(11, 281))


async def test_a_pin_gives_way_when_only_its_memory_is_left_for_an_admitted_request(site: Site) -> None:
    large = await site.add_worker("large", num_blocks=64, num_seats=1)
    large.may_answer.clear()
    num_steps = len(large.steps)
    running = asyncio.create_task(site.run(counting(10, 280)))  # 18 blocks, which `small` has as well
    await until(lambda: len(large.steps) > num_steps)
    await site.add_worker("small", num_blocks=20)
    await pin(site, blocks_of(3))
    assert workers_of(site) == {"small"}
    await lose(site, large)
    assert num_pinned_blocks(site) == {"small": 0}
    assert tokens_in(await running) == list(range(11, 291))
    await until(lambda: workers_of(site) == {"small"})
    await site.idle()


async def test_a_pin_gives_way_to_a_paused_request_that_lost_its_worker(site: Site) -> None:
    large = await site.add_worker("large", num_blocks=64, num_seats=1)
    large.may_answer.clear()
    num_steps = len(large.steps)
    running = asyncio.create_task(site.run(counting(10, 280, "paused")))  # 18 blocks, which `small` has as well
    await until(lambda: len(large.steps) > num_steps)
    await site.add_worker("small", num_blocks=20)
    await pin(site, blocks_of(3))
    await site.inference.Pause(pb.PauseRequest(request_id="paused"))
    await lose(site, large)
    assert num_pinned_blocks(site) == {"small": 0}
    await site.inference.Resume(pb.ResumeRequest(request_id="paused"))
    assert tokens_in(await running) == list(range(11, 291))
    await site.idle()


async def test_a_lost_prefix_that_cannot_be_computed_is_tried_again_at_its_next_use_alone(site: Site) -> None:
    worker = await site.add_worker()
    await pin(site)
    sick: list[ScriptedWorker] = []

    def fail(follower: ScriptedWorker) -> None:
        follower.refuse(worker_pb2.STEP_STATUS_FAILED, times=MAX_FAILED_STEPS)
        sick.append(follower)

    await replace(site, worker, fail)
    await until(lambda: prefix_of(site).is_missed)
    assert prefix_of(site).group is None and prefix_of(site).retry is None
    await site.idle()
    num_sequences = site.engine.number_sequences(0)
    await site.add_worker("w2")
    await lose(site, sick[0])
    assert site.engine.number_sequences(0) == num_sequences and not workers_of(site)
    await pin(site)
    assert workers_of(site) == {"w2"}
    await site.idle()


async def test_the_pins_of_another_model_are_forgotten(site: Site) -> None:
    worker = await site.add_worker()
    await pin(site)

    def change(follower: ScriptedWorker) -> None:
        follower.description.model.fingerprint = "counting-2"

    await replace(site, worker, change)
    assert await pinned(site) == {}
    assert site.engine.on_result is None
    assert (await pin(site)).created


async def test_who_waits_for_a_prefix_of_a_model_that_is_replaced_is_told_to_ask_again_soon(site: Site) -> None:
    worker = await site.add_worker()
    worker.script = silence
    asking = asyncio.create_task(pin(site))
    await until(lambda: len(worker.steps) == 1)

    def change(follower: ScriptedWorker) -> None:
        follower.description.model.fingerprint = "counting-2"

    await replace(site, worker, change)
    with pytest.raises(grpc.aio.AioRpcError, match="another model is served now") as caught:
        await asking
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and retry_delay_s(caught.value) == 1.0


async def test_blocks_of_another_size_keep_as_much_as_they_can(site: Site) -> None:
    worker = await site.add_worker()
    await pin(site)

    def change(follower: ScriptedWorker) -> None:
        follower.description.pool.block_size = 8

    await replace(site, worker, change)
    await until(lambda: workers_of(site) == {"w1"})
    answer = await pin(site)
    assert (answer.prefix.num_tokens, answer.prefix.num_blocks, answer.created) == (40, 5, False)
    assert await cached_tokens(site, beginning(PREFIX)) == 40


async def test_after_the_end_of_the_service_a_loss_is_not_made_good(site: Site) -> None:
    first = await site.add_worker("w1")
    await pin(site)
    second = await site.add_worker("w2")
    site.keeper.close()
    await lose(site, first)
    assert await pinned(site) == {"system": []}
    await cached_tokens(site, beginning(PREFIX))
    assert await pinned(site) == {"system": []}
    assert num_computed(second) == 41 + 3


async def test_a_prefix_that_is_evicted_whenever_it_was_computed_is_given_up_after_some_attempts(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.engine.scheduler.workers, "pin_blocks", lambda *blocks: False)
    worker = await site.add_worker()
    for num_asked in (1, 2):  # the second time as often as the first
        code, message = await refusal(site, pin_request())
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "evicted as soon as it was computed" in message
        computing = [step for step in worker.steps if step.rows]
        assert len(computing) == num_asked * MAX_ATTEMPTS


async def test_a_loss_is_told_to_the_operator_once_however_often_the_prefix_is_tried_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await site.add_worker()
    await pin(site)
    num_tries = 0

    def refuse(*blocks: object) -> bool:
        nonlocal num_tries
        num_tries += 1
        raise PinRefusedError("no room")

    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(site.engine.scheduler.workers, "pin_blocks", refuse)
        await replace(site, worker)
        await until(lambda: num_tries > 3)
        assert not workers_of(site) and prefix_of(site).is_missed
    lost = [each for each in logs if each["event"] == "prefix lost"]
    assert [(each["name"], each["reason"]) for each in lost] == [("system", "no room")]
    await until(lambda: workers_of(site) == {"w1"})
    assert not prefix_of(site).is_missed
