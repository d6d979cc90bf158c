"""Publisher by itself, on a journal that acknowledges when the test says so: what is released when, how it counts."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from common.running_histogram import RunningHistogram
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.live.distributions import DistributionRecorder
from scheduler_svc.requests.live.live_request import LiveRequest
from scheduler_svc.requests.live.live_sample import LiveSample
from scheduler_svc.requests.live.publisher import Delivery, Publisher
from tests.scheduler.live_requests import drawing, live, settle

LONG_S = 1000  # so long that the time of the test itself does not count
LONG_NS = LONG_S * 1_000_000_000


class Desk:
    """A publisher, and its entries that the journal has not acknowledged."""

    def __init__(self, delivery: Delivery) -> None:
        self.seen = DistributionRecorder()
        self.unacknowledged: list[Callable[[], None]] = []
        journal: Any = self
        self.publisher = Publisher(
            journal,
            journal,
            push_text=lambda request, sample: sample.push_text(),
            on_closed=lambda request: None,
            delivery=delivery,
            distributions=self.seen,
        )

    def append(self, *, on_durable: Callable[[], None], **entry: object) -> None:
        self.unacknowledged.append(on_durable)

    def settle(self, request: LiveRequest, tokens: dict[LiveSample, list[int]]) -> int:
        for sample, token_ids in tokens.items():
            sample.token_ids.extend(token_ids)
        self.publisher.add_news(dict.fromkeys(tokens, request))
        return self.publisher.settle()

    def acknowledge(self) -> None:
        self.unacknowledged.pop(0)()


def number_of(histogram: RunningHistogram) -> int:
    return sum(histogram.counts)


def test_settling_nothing_delivers_nothing_and_writes_nothing() -> None:
    desk = Desk("durable")
    assert desk.publisher.settle() == 0 and not desk.unacknowledged


@pytest.mark.parametrize("delivery", ["durable", "relaxed"])
def test_tokens_are_released_by_the_acknowledgement_or_at_once_and_count_once(delivery: Delivery) -> None:
    desk, request = Desk(delivery), live(drawing(2))
    request.times.arrived_ns = time.monotonic_ns() - LONG_NS
    first, second = request.samples
    assert desk.settle(request, {first: [1, 2], second: [3]}) == 2
    is_relaxed = delivery == "relaxed"
    assert (request.times.first_token_ns is not None) is is_relaxed
    assert [each.stream.num_released for each in request.samples] == ([2, 1] if is_relaxed else [0, 0])
    desk.acknowledge()
    assert [each.stream.num_released for each in request.samples] == [2, 1]
    assert number_of(desk.seen.first_token_s) == 1 and number_of(desk.seen.token_s) == 0
    assert LONG_S <= desk.seen.first_token_s.sum < 2 * LONG_S


def test_a_later_acknowledgement_takes_back_nothing_that_was_shown_since() -> None:
    desk, request = Desk("relaxed"), live()
    (sample,) = request.samples
    desk.settle(request, {sample: [1]})
    desk.settle(request, {sample: [2, 3]})
    desk.acknowledge()
    assert sample.stream.num_released == 3 and sample.num_durable == 1


def test_tokens_behind_the_first_ones_count_by_their_share_of_the_time_since_the_last() -> None:
    desk, request = Desk("durable"), live()
    (sample,) = request.samples
    for token_ids in ([1], [2, 3, 4, 5], [6]):
        desk.settle(request, {sample: token_ids})
        if len(token_ids) > 1:
            assert sample.released_ns is not None
            sample.released_ns -= LONG_NS
        desk.acknowledge()
    assert number_of(desk.seen.first_token_s) == 1
    assert number_of(desk.seen.token_s) == 5 and LONG_S <= desk.seen.token_s.sum < 2 * LONG_S
    assert desk.seen.token_s.counts[-1] == 4  # each of them took a quarter, which is above the last bound


def test_the_moment_of_the_first_token_stays() -> None:
    desk, request = Desk("durable"), live()
    (sample,) = request.samples
    desk.settle(request, {sample: [1]})
    desk.acknowledge()
    assert request.times.first_token_ns is not None
    request.times.first_token_ns -= LONG_NS
    moment = request.times.first_token_ns
    desk.settle(request, {sample: [2]})
    desk.acknowledge()
    assert request.times.first_token_ns == moment


def test_a_preemption_counts_as_durable_with_the_acknowledgement_of_its_entry() -> None:
    desk, request = Desk("durable"), live()
    (sample,) = request.samples
    request.group.num_preemptions = 2
    desk.settle(request, {sample: [1]})
    request.group.num_preemptions = 3
    desk.settle(request, {sample: [2]})
    counts = [request.durable.num_preemptions]
    for _ in range(2):
        desk.acknowledge()
        counts.append(request.durable.num_preemptions)
    assert counts == [0, 2, 3]


@pytest.mark.parametrize("delivery", ["durable", "relaxed"])
@pytest.mark.parametrize(("entries", "num_intervals"), [([[1]], 0), ([[1], [2, 3]], 2)])
def test_tokens_that_come_with_the_end_of_their_sample_count_as_others(
    delivery: Delivery, entries: list[list[int]], num_intervals: int
) -> None:
    desk, request = Desk(delivery), live()
    (sample,) = request.samples
    for number, token_ids in enumerate(entries, 1):
        if number == len(entries):
            sample.finish = pb.SampleFinish(reason=pb.FINISH_REASON_LENGTH)
        desk.settle(request, {sample: token_ids})
        desk.acknowledge()
    assert sample.stream.finish is not None and request.times.first_token_ns is not None
    assert (number_of(desk.seen.first_token_s), number_of(desk.seen.token_s)) == (1, num_intervals)


def test_of_a_request_that_an_earlier_leader_ran_the_moment_of_the_first_token_stays_unknown() -> None:
    desk, request = Desk("durable"), live()
    (sample,) = request.samples
    settle(sample, 1)
    sample.stream.num_released = 1
    desk.settle(request, {sample: [2]})
    desk.acknowledge()
    assert sample.stream.num_released == 2
    assert request.times.first_token_ns is None and not number_of(desk.seen.first_token_s)
    request.ended_state, request.times.finished_ns = pb.REQUEST_STATE_FINISHED, request.times.arrived_ns + 700
    assert request.settle_outcome().timings == pb.Timings(finished_ns=700)
