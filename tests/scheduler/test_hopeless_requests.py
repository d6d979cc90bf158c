"""Requests whose deadline cannot be met, on the real serving path: they end early, and only if it really cannot."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import cast

import pytest

import quire
from quire.v1 import worker_pb2
from scheduler_svc.core.admitting import late_groups
from scheduler_svc.core.preemption import PreemptionCosts
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.waiting_queue import WaitingQueue
from scheduler_svc.requests.live.hopeless_requests import HOPELESS_EVERY_S, HopelessRequests
from tests.patience import patient
from tests.scheduler.scripted_worker import Answer
from tests.scheduler.serving_site import Site, running_site
from tests.scheduler.worker_states import make_worker


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as made:
        yield made


async def test_requests_that_an_idle_worker_would_finish_too_late_end_long_before_their_deadline(site: Site) -> None:
    """One after the other: the second comes so soon that the queue has only just been searched."""
    await site.add_worker()
    site.engine.scheduler.workers.record_costs("w1", PreemptionCosts(prefill_tokens_per_s=0.001))
    began_s = time.monotonic()
    async with quire.AsyncClient(site.address) as client:
        for _ in range(3):
            with pytest.raises(quire.RequestExpiredError, match="could not be met"):
                await asyncio.wait_for(client.generate([10], max_tokens=4, timeout_s=600.0), timeout=patient(30.0))
    assert time.monotonic() - began_s < patient(30.0)
    await site.idle()


async def test_short_prompts_do_not_make_a_long_one_seem_too_late(site: Site) -> None:
    """Steps of 2 tokens, each of which is said to take 1 s, say that 30 tokens take 1 s at least, not 15 s."""
    worker = await site.add_worker()
    answer = worker.execute

    def slow(request: worker_pb2.StepRequest) -> Answer:
        response = answer(request)
        response.exec_ns = 1_000_000_000
        return response

    worker.script = slow
    async with quire.AsyncClient(site.address) as client:
        for start in range(5):
            await client.generate([start, 10], max_tokens=1)
        speed = (await client.stats()).workers[0].prefill_tokens_per_s
        assert speed == pytest.approx(2.0)
        completion = await client.generate([10] * 30, max_tokens=2, timeout_s=10.0)
        assert completion.token_ids == (11, 12)
    await site.idle()


@pytest.mark.parametrize("is_idle", [True, False])
async def test_only_an_idle_worker_is_woken_for_the_next_search_and_once(
    site: Site, is_idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy worker asks again by itself."""
    monkeypatch.setattr(WaitingQueue, "num_groups", 1)
    wakes: list[float] = []
    site.engine.add_waker(lambda: wakes.append(time.monotonic()))
    now_s = time.monotonic()
    for _ in range(3):
        site.engine.hopeless.drop(now_s, is_idle=is_idle)  # the first one searches
    await asyncio.sleep(4 * HOPELESS_EVERY_S)
    assert len(wakes) == is_idle


class SlowQueue:
    """Scheduler whose queue takes 20 ms to search."""

    num_groups = 10_000

    def __init__(self) -> None:
        self.waiting = self
        self.searched_s: list[float] = []

    def expired_groups(self, now_s: float) -> list[SequenceGroup]:
        self.searched_s.append(now_s)
        time.sleep(0.02)
        return []


def test_a_queue_that_takes_long_to_search_is_searched_less_often() -> None:
    queue = SlowQueue()
    hopeless = HopelessRequests(cast(Scheduler, queue), lambda group: None, lambda: None)
    for now_s in (100.0, 100.06, 100.39, 1000.0):
        hopeless.drop(now_s, is_idle=False)
    assert queue.searched_s == [100.0, 1000.0], "20 times 20 ms later"


def test_of_a_request_with_time_to_spare_only_deadline_and_prompt_are_looked_at() -> None:
    class Untouched(SequenceGroup):
        @property
        def live(self) -> list[Sequence]:
            raise AssertionError("its members are looked at")

    group = Untouched([Sequence(1, [1] * 30, 30, 5, frozenset())], arrival=1, deadline_s=5.0)
    worker = make_worker()
    worker.costs = PreemptionCosts(prefill_tokens_per_s=10.0)
    assert late_groups([group], [worker], 2.0) == []
    with pytest.raises(AssertionError, match="looked at"):
        late_groups([group], [worker], 2.1)
