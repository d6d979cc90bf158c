"""Counts of how requests ended, and distributions of steps, requests and their lengths."""

import asyncio
import random
import time

import pytest

from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.step_plan import StepPlan
from scheduler_svc.requests.live.distributions import DistributionRecorder, EndCounter
from tests.scheduler.gated_store import GatedStore
from tests.scheduler.journal_setup import until
from tests.scheduler.live_requests import ARRIVED_NS, MAX_TOKENS, PROMPT, drawing, live
from tests.scheduler.scripted_beams import of_kind
from tests.scheduler.serving_site import counting, running_site

LENGTH, STOP = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("state", "reasons", "name"),
    [
        (pb.REQUEST_STATE_FINISHED, [STOP, LENGTH], "length"),
        (pb.REQUEST_STATE_FINISHED, [STOP, STOP], "stop"),
        (pb.REQUEST_STATE_FINISHED, [], "stop"),
        (pb.REQUEST_STATE_CANCELLED, [LENGTH], "cancelled"),
        (pb.REQUEST_STATE_EXPIRED, [LENGTH], "expired"),
        (pb.REQUEST_STATE_FAILED, [LENGTH], "failed"),
        (None, [], "failed"),
    ],
)
def test_each_end_counts_once_by_its_state_or_the_reason_of_a_sample(
    state: int | None, reasons: list[int], name: str
) -> None:
    counter = EndCounter()
    none = dict.fromkeys(("stop", "length", "cancelled", "expired", "failed"), 0)
    assert vars(counter) == none
    for number in (1, 2):
        counter.record_end(state, reasons)
        assert vars(counter) == {**none, name: number}


def test_a_step_counts_by_its_tokens_and_times_in_seconds() -> None:
    seen = DistributionRecorder()
    plan = StepPlan("w", 1, snapshot=False, num_tokens=[3, 1])
    seen.record_step(plan, 2_000_000_000, 500_000_000)
    seen.record_step(plan, 1_000_000_000, None)
    assert (seen.step_tokens.sum, seen.step_s.sum, seen.step_overhead_s.sum) == (8, 3.0, 0.5)
    assert [sum(each.counts) for each in (seen.step_tokens, seen.step_s, seen.step_overhead_s)] == [2, 2, 1]


TIMES = ("queue_s", "prefill_s", "decode_s", "inference_s", "total_s", "mean_token_s")
LENGTHS = (
    "prompt_tokens",
    "computed_prompt_tokens",
    "output_tokens",
    "longest_output_tokens",
    "num_samples",
    "max_tokens",
)


def sums(seen: DistributionRecorder, names: tuple[str, ...]) -> list[float]:
    return [getattr(seen, name).sum for name in names]


def counts(seen: DistributionRecorder, names: tuple[str, ...]) -> list[int]:
    return [sum(getattr(seen, name).counts) for name in names]


def test_a_request_counts_by_the_times_between_its_moments_and_by_its_lengths() -> None:
    seen, request = DistributionRecorder(), live(drawing(2))
    times = request.times
    times.first_scheduled_ns = ARRIVED_NS + 1_000_000_000
    times.first_token_ns = ARRIVED_NS + 3_000_000_000
    times.finished_ns = ARRIVED_NS + 9_000_000_000
    request.group.sequences[0].num_cached_tokens = 1
    for sample, num_tokens in zip(request.stream.samples, (4, 2), strict=True):
        sample.token_ids.extend([7] * num_tokens)
        sample.num_released = num_tokens
    seen.record_end(request)
    assert sums(seen, TIMES) == [1.0, 2.0, 6.0, 8.0, 9.0, 2.0]
    assert sums(seen, LENGTHS) == [len(PROMPT), len(PROMPT) - 1, 6, 4, 2, MAX_TOKENS]
    assert counts(seen, TIMES) == counts(seen, LENGTHS) == [1] * 6


def test_moments_that_did_not_come_count_in_no_time_and_none_is_below_zero() -> None:
    seen, request = DistributionRecorder(), live()
    request.times.first_scheduled_ns = ARRIVED_NS - 1
    seen.record_end(request)
    assert counts(seen, TIMES) == [1, 0, 0, 0, 0, 0] and counts(seen, LENGTHS) == [1] * 6
    assert sums(seen, TIMES) == [0.0] * 6 and seen.longest_output_tokens.sum == 0


async def test_every_request_that_was_served_counts_once_by_its_end() -> None:
    stopping = counting(10, 40)
    stopping.stopping.stop_token_ids.append(13)
    async with running_site() as site:
        worker = await site.add_worker()
        for request in (counting(10), stopping, counting(20)):
            await site.run(request)
        worker.may_answer.clear()
        await site.admission.submit(counting(10, request_id="r"), None)
        await site.control.cancel("r")
        worker.may_answer.set()
        await site.idle()
        assert vars(site.engine.ends) == {"stop": 1, "length": 2, "cancelled": 1, "expired": 0, "failed": 0}
        assert counts(site.engine.distributions, ("total_s", "output_tokens")) == [4, 4]
        assert site.engine.distributions.output_tokens.sum == 4 + 3 + 4


async def test_the_latency_of_a_request_lasts_until_its_end_is_durable() -> None:
    """Regression: while the store stood still for 3 s requests counted as ended within 0.3 s, as no client saw them."""
    store = GatedStore()
    async with running_site(store) as site:
        worker = await site.add_worker()
        worker.may_answer.clear()
        running = asyncio.create_task(site.run(counting(10, 1, "r")))
        await until(lambda: "r" in site.engine.live)
        times = site.engine.live["r"].times
        store.may_append.clear()
        worker.may_answer.set()
        await until(lambda: times.finished_ns is not None)
        going_on_ns = time.monotonic_ns()
        store.may_append.set()
        await running
        await site.idle()
        seen = site.engine.distributions
        assert seen.total_s.sum >= (going_on_ns - times.arrived_ns) / 1e9
        assert seen.total_s.sum >= seen.first_token_s.sum
        assert times.first_token_ns is not None and times.first_token_ns >= going_on_ns


async def test_every_request_with_output_counts_once_by_its_first_token_and_by_each_later_one() -> None:
    kinds = [of_kind(kind, 10 * kind, 6, f"r{kind}", random.Random(kind)) for kind in range(5)]
    async with running_site() as site:
        await site.add_worker()
        for request in (counting(100, 1), counting(200, 5)):
            await site.run(request)
        seen = site.engine.distributions
        assert counts(seen, ("first_token_s", "token_s", "total_s")) == [2, 4, 2]
        for request in kinds:
            await site.run(request)
        await site.idle()
        assert counts(seen, ("first_token_s", "prefill_s", "total_s")) == [7] * 3
