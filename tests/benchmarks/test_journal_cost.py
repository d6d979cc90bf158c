"""Summary of the journal's benchmark."""

from benchmarks.durability.journal_cost import cost_of


def test_a_percentile_is_the_smallest_latency_that_so_many_do_not_exceed() -> None:
    latencies_ns = [1_000_000 * number for number in range(100, 0, -1)]
    cost = cost_of("steps", 4, 100, 100, 0, 0, latencies_ns)
    assert (cost.latency_p50_ms, cost.latency_p99_ms) == (50.0, 99.0)
