"""Lag of tokens, from the times they were made and read, on made-up moments."""

import pytest

from benchmarks.overhead.delivery_load import Delivery, Load, Received, delivery_of
from benchmarks.overhead.delivery_table import CpuPerToken, delivery_row, keeps_up
from benchmarks.overhead.overhead_table import Spread
from benchmarks.services.step_trace import WorkerMoments
from benchmarks.services.traced_services import CpuSeconds

MS = 1_000_000
LOAD = Load(num_readers=2, seconds=1.0, prompt_tokens=1, output_tokens=(1, 2), vocab_size=9)


def made(num_steps: int) -> list[WorkerMoments]:
    """Make two tokens a step, every 10 ms."""
    return [WorkerMoments(n, 2, 2, 2, (10 * n - 8) * MS, 10 * n * MS) for n in range(1, num_steps + 1)]


def received(lags_ms: list[float]) -> Received:
    """Receive one token of each step at once and the other later."""
    read = Received()
    for n, lag_ms in enumerate(lags_ms, start=1):
        read.at_ns.extend((10 * n * MS, int((10 * n + lag_ms) * MS)))
        read.num_tokens.extend((1, 1))
    return read


def test_a_step_is_as_late_as_its_last_token() -> None:
    delivery = delivery_of(LOAD, made(120), received([2.0] * 120))
    assert (delivery.lag.p50, delivery.lag.p99) == (2.0, 2.0)
    assert delivery.lag_growth_ms_per_s == pytest.approx(0.0)
    assert delivery.tokens_per_s == pytest.approx(200, rel=0.02)
    assert delivery.lag_p99_by_third == [2.0, 2.0, 2.0]


def test_a_reader_that_falls_behind_is_seen() -> None:
    delivery = delivery_of(LOAD, made(120), received([0.05 * n for n in range(120)]))
    assert delivery.lag_growth_ms_per_s == pytest.approx(5.0, rel=0.01)  # 0.05 ms each 10 ms
    assert delivery.lag_p99_by_third[0] < delivery.lag_p99_by_third[2]


def test_tokens_that_were_never_read_are_not_passed_over() -> None:
    with pytest.raises(ValueError, match="240 tokens were made, but 238 read"):
        delivery_of(LOAD, made(120), received([2.0] * 119))


@pytest.mark.parametrize(
    ("tokens_per_s", "growth", "expected"), [(20_000, 0.1, True), (19_000, 0, False), (30_000, 2, False)]
)
def test_keeping_up_is_a_rate_without_growing_lag(tokens_per_s: float, growth: float, expected: bool) -> None:
    delivery = Delivery(
        seconds=30.0,
        tokens_per_s=tokens_per_s,
        lag=Spread(p50=1.0, p90=1.0, p99=1.0),
        lag_p99_by_third=[1.0, 1.0, 1.0],
        lag_growth_ms_per_s=growth,
    )
    cpu = CpuPerToken.of(
        CpuSeconds(scheduler=1.0, worker=1.0, store=0.5),
        CpuSeconds(scheduler=2.0, worker=1.5, store=0.5),
        client_s=0.25,
        num_tokens=100_000,
    )
    assert cpu == CpuPerToken(scheduler=10.0, worker=5.0, store=0.0, client=2.5)
    assert delivery_row(LOAD, 8.0, delivery, cpu)["keeps_up"] is keeps_up(delivery) is expected
