"""Latency of requests that ended lately: which count, and their percentiles."""

import pytest

from scheduler_svc.requests.live.recent_latency import MAX_KEPT, WINDOW_S, LatencySummary, RecentLatency, percentile


@pytest.mark.parametrize(
    ("values", "median", "p99"),
    [
        ([7], 7, 7),
        ([1, 2], 1, 2),
        ([1, 2, 3], 2, 3),
        (list(range(1, 101)), 50, 99),
        (list(range(1, 201)), 100, 198),
    ],
)
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values: list[int], median: int, p99: int) -> None:
    assert (percentile(values, 50), percentile(values, 99)) == (median, p99)


def test_nothing_has_no_percentile() -> None:
    assert RecentLatency().summary(5.0) == LatencySummary(0, None, None, None, None)


def test_requests_without_output_and_outputs_of_one_token_count_for_what_they_have() -> None:
    latency = RecentLatency()
    latency.record_end(1.0, None, None)
    latency.record_end(1.0, 30, None)
    latency.record_end(2.0, 10, 4)
    assert latency.summary(2.0) == LatencySummary(2, 10, 30, 4, 4)


def test_of_many_requests_the_median_and_the_slowest_in_a_hundred_are_told_apart() -> None:
    latency = RecentLatency()
    for number in range(200, 0, -1):
        latency.record_end(1.0, number, 1000 * number)
    assert latency.summary(1.0) == LatencySummary(200, 100, 198, 100_000, 198_000)


def test_who_ended_before_the_window_counts_no_more() -> None:
    latency = RecentLatency()
    latency.record_end(1.0, 10, 1)
    latency.record_end(2.0, 20, 2)
    assert latency.summary(1.0 + WINDOW_S).num_requests == 2
    assert latency.summary(1.5 + WINDOW_S) == LatencySummary(1, 20, 20, 2, 2)


def test_only_the_latest_are_kept() -> None:
    latency = RecentLatency()
    for number in range(MAX_KEPT + 5):
        latency.record_end(1.0, number, number)
    kept = latency.summary(1.0)
    assert (kept.num_requests, kept.first_token_p99_ns) == (MAX_KEPT, 5 + MAX_KEPT * 99 // 100)
