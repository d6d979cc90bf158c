"""Limits on what waits and on what is paused, at their edges: who counts, and when the refused are to come back."""

import time
import weakref

import pytest

from quire.errors import OverloadedError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.records import Records
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.live_request import LiveRequest, RequestTimes
from scheduler_svc.requests.live.new_request import new_live_request
from scheduler_svc.requests.live.paused_requests import PausedRequests
from scheduler_svc.requests.queue_limits import MAX_RETRY_S, MIN_RETRY_S, AdmissionLimits, QueueLimits, check_pause
from tests.scheduler.request_settling import request_of, settled


def limits_of(**limits: float) -> AdmissionLimits:
    return AdmissionLimits(**{"max_queue_requests": 1000, "max_queue_tokens": 1_000_000, **limits})  # type: ignore[arg-type]


def request(tenant: str, num_tokens: int, number: int = 1, num_samples: int = 1) -> LiveRequest:
    return new_live_request(
        settled(request_of(tenant=tenant, sampling=pb.SamplingParams(n=num_samples))),
        [1] * num_tokens,
        digest=b"",
        seq_id=number,
        max_tokens=1,
        deadline_s=None,
        tokenizer=None,
        wanted=pb.OutputParams(),
        times=RequestTimes(arrived_ns=0, arrived_unix_ns=0),
    )


class Queue:
    """A queue without workers, and the limits on it."""

    def __init__(self, **limits: float) -> None:
        store = MemoryStore()
        self._engine = Engine(Scheduler(SchedulerConfig()), Journal(store, leader_id="test"), Records(store))
        self._num_groups = 0
        self.limits = QueueLimits(self._engine, limits_of(**limits))

    def add(self, tenant: str, num_tokens: int = 1) -> None:
        """Add a request that has been admitted."""
        self._num_groups += 1
        self._engine.scheduler.add(request(tenant, num_tokens, number=self._num_groups).group)

    def stall(self, seconds: float) -> None:
        """Say that nobody has been served for so long, as which each that is ahead will then take."""
        self._engine.waits.queue_wait.record_step(time.monotonic() - seconds, num_served=0, num_waiting=1)

    def check(self, tenant: str, priority: int = 0) -> None:
        self.limits.check_newcomer(tenant, priority, None)


async def test_requests_that_wait_and_requests_on_their_way_in_fill_the_queue_together() -> None:
    queue = Queue(max_queue_requests=4)
    queue.add("a")
    queue.add("b")
    queue.limits.enter("c")
    queue.check("d")
    queue.limits.enter("d")
    with pytest.raises(OverloadedError, match="the queue is full: 4 requests wait"):
        queue.check("e")
    queue.limits.leave("c", 0)
    queue.check("e")


async def test_both_count_for_the_share_of_their_tenant_and_for_no_other() -> None:
    queue = Queue(max_queue_requests=10, max_queue_share=0.4)
    queue.add("mine", num_tokens=50)
    queue.add("mine")
    queue.limits.enter("mine")
    queue.check("mine")
    queue.limits.enter("mine")
    with pytest.raises(OverloadedError, match="4 requests of this tenant wait"):
        queue.check("mine")
    queue.check("other")
    queue.limits.leave("mine", 0)
    queue.check("mine")


async def test_however_small_its_share_a_tenant_may_have_one_request_in_the_queue() -> None:
    queue = Queue(max_queue_requests=10, max_queue_share=0.01)
    queue.check("a")
    queue.add("a")
    with pytest.raises(OverloadedError, match="1 requests of this tenant wait"):
        queue.check("a")
    queue.check("b")


async def test_prompt_tokens_may_fill_the_queue_to_the_last_and_count_until_their_request_leaves() -> None:
    queue = Queue(max_queue_tokens=100)
    queue.limits.check_tokens("a", 10_000)  # alone a prompt may have any length
    queue.add("a", num_tokens=60)
    queue.limits.enter("b")
    queue.limits.enter("b", 20)
    queue.limits.check_tokens("c", 20)
    with pytest.raises(OverloadedError, match="80 prompt tokens wait"):
        queue.limits.check_tokens("c", 21)
    queue.limits.leave("b", 20)
    queue.limits.check_tokens("c", 40)
    with pytest.raises(OverloadedError, match="60 prompt tokens wait"):
        queue.limits.check_tokens("c", 41)


async def test_a_prompt_on_its_way_in_counts_although_nothing_waits() -> None:
    queue = Queue(max_queue_tokens=100)
    queue.limits.enter("b")
    queue.limits.enter("b", 1)
    queue.limits.check_tokens("c", 99)
    with pytest.raises(OverloadedError):
        queue.limits.check_tokens("c", 100)


async def test_prompt_tokens_may_fill_the_share_of_their_tenant_to_the_last() -> None:
    queue = Queue(max_queue_tokens=100, max_queue_share=0.5)
    queue.add("mine", num_tokens=20)
    queue.limits.enter("mine")
    queue.limits.enter("mine", 10)
    queue.limits.check_tokens("mine", 20)
    with pytest.raises(OverloadedError, match="30 prompt tokens of this tenant wait"):
        queue.limits.check_tokens("mine", 21)
    queue.limits.check_tokens("other", 70)  # it is the only one of its tenant
    queue.limits.leave("mine", 10)
    queue.limits.check_tokens("mine", 30)


async def test_the_wait_of_a_newcomer_is_of_those_before_it() -> None:
    queue = Queue(max_queue_wait_s=2500.0)
    queue.stall(1000.0)
    queue.add("a")
    queue.limits.enter("b")
    queue.check("c")  # 2000 s
    queue.add("a")
    with pytest.raises(OverloadedError, match=r"would wait some 30\d\d\.\d s for a worker, behind 3 "):
        queue.check("c")
    queue.check("c", priority=-1)  # only who is on its way in may come before it


async def test_who_need_not_wait_comes_in_however_short_a_wait_is_allowed() -> None:
    Queue(max_queue_wait_s=0.0).check("a")


@pytest.mark.parametrize(
    ("stall_s", "least", "most"),
    [(None, 0.5, 2.0), (5.0, 10.0, 40.0), (10_000.0, MAX_RETRY_S, MAX_RETRY_S), (1e-9, MIN_RETRY_S, 40.0)],
)
async def test_the_refused_are_to_come_back_when_those_ahead_are_expected_to_be_served(
    stall_s: float | None, least: float, most: float
) -> None:
    """Within bounds, and soon if nothing was measured."""
    queue = Queue(max_queue_requests=2)
    if stall_s is not None:
        queue.stall(stall_s)
    for _ in range(2):
        queue.add("a")
    with pytest.raises(OverloadedError) as caught:
        queue.check("b")
    assert least <= caught.value.retry_after_s <= most


async def test_nothing_is_kept_of_a_tenant_of_which_nothing_is_on_its_way_in() -> None:
    class Name(str):
        """Name of a tenant whose end can be seen."""

        __slots__ = ("__weakref__",)

    queue, name = Queue(), Name("a")
    seen = weakref.ref(name)
    queue.limits.enter(name)
    queue.limits.enter(name, 7)
    queue.limits.leave(name, 7)
    del name
    assert seen() is None


def paused_of(*requests: LiveRequest) -> PausedRequests:
    paused = PausedRequests()
    for each in requests:
        paused.add(each)
    return paused


def test_the_tokens_of_paused_requests_may_reach_their_limit_and_one_alone_may_have_any_number() -> None:
    limits = limits_of(max_paused_tokens=100)
    check_pause(request("a", 10_000), paused_of(), limits)
    paused = paused_of(request("a", 60))
    check_pause(request("b", 40), paused, limits)
    with pytest.raises(OverloadedError, match="1 requests with 60 tokens are paused") as caught:
        check_pause(request("b", 41), paused, limits)
    assert caught.value.retry_after_s > 0


def test_a_prompt_counts_once_among_paused_tokens_and_the_output_of_each_sample_does() -> None:
    """Regression: it counted once more for each sample."""
    paused = request("a", 60, num_samples=3)
    for sample in paused.samples:
        sample.token_ids.append(7)
    assert paused_of(paused).size() == (1, 63)
    check_pause(request("b", 37), paused_of(paused), limits_of(max_paused_tokens=100))


def test_a_tenants_share_of_paused_tokens_may_be_reached_and_others_have_the_rest() -> None:
    limits = limits_of(max_paused_tokens=100, max_paused_share=0.5)
    paused = paused_of(request("mine", 30))
    check_pause(request("mine", 20), paused, limits)
    with pytest.raises(OverloadedError, match="1 requests of this tenant with 30 tokens are paused"):
        check_pause(request("mine", 21), paused, limits)
    check_pause(request("other", 70), paused, limits)


def test_however_small_its_share_a_tenant_may_have_one_request_paused_and_pause_it_again() -> None:
    limits = limits_of(max_paused_requests=2, max_paused_share=0.01)
    mine, other = request("mine", 5), request("other", 5)
    check_pause(mine, paused_of(), limits)
    check_pause(other, paused_of(mine), limits)
    with pytest.raises(OverloadedError, match="1 requests of this tenant"):
        check_pause(request("mine", 5), paused_of(mine), limits)
    with pytest.raises(OverloadedError, match="2 requests with 10 tokens"):
        check_pause(request("third", 5), paused_of(mine, other), limits)
    check_pause(mine, paused_of(mine, other), limits)
