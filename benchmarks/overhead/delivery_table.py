"""The figures of a delivery under load: how late tokens are, what they cost each process, and the target."""

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.overhead.delivery_load import Delivery, Load
from benchmarks.report import table
from benchmarks.services.traced_services import CpuSeconds

TARGET_TOKENS_PER_S = 20_000
MAX_GROWTH_MS_PER_S = 1.0  # of the lag: a reader that falls behind by 1 % falls behind by 10 ms a second


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPerToken:
    """Microseconds of CPU, over the whole load with its beginning and end."""

    scheduler: float
    worker: float
    store: float
    client: float

    @classmethod
    def of(cls, before: CpuSeconds, after: CpuSeconds, *, client_s: float, num_tokens: int) -> "CpuPerToken":
        def each(seconds: float) -> float:
            return round(seconds / num_tokens * 1e6, 3)

        return cls(
            scheduler=each(after.scheduler - before.scheduler),
            worker=each(after.worker - before.worker),
            store=each(after.store - before.store),
            client=each(client_s),
        )


def keeps_up(delivery: Delivery) -> bool:
    """True if readers get tokens as fast as they are made, at the target rate."""
    is_fast = delivery.tokens_per_s >= TARGET_TOKENS_PER_S
    return is_fast and delivery.lag_growth_ms_per_s < MAX_GROWTH_MS_PER_S


def delivery_row(load: Load, step_ms: float, delivery: Delivery, cpu: CpuPerToken) -> dict[str, Any]:
    """Row for the result file."""
    return {
        "load": asdict(load),
        "step_ms": step_ms,
        **asdict(delivery),
        "cpu_us_per_token": asdict(cpu),
        "target_tokens_per_s": TARGET_TOKENS_PER_S,
        "keeps_up": keeps_up(delivery),
    }


def print_delivery(delivery: Delivery, cpu: CpuPerToken) -> None:
    lag = delivery.lag
    head = ("tokens/s", "lag p50 ms", "p90", "p99", "p99 by third", "grows ms/s")
    thirds = " ".join(f"{each:.1f}" for each in delivery.lag_p99_by_third)
    figures = (*(f"{ms:.2f}" for ms in (lag.p50, lag.p90, lag.p99)), thirds, delivery.lag_growth_ms_per_s)
    print(table(head, [(f"{delivery.tokens_per_s:,.0f}", *figures)]))
    rate = delivery.tokens_per_s / 1e6
    shares = [(name, us, f"{us * rate:.0%}") for name, us in asdict(cpu).items()]
    print(table(("process", "CPU us/token", "of a core"), shares))
    verdict = "keep up" if keeps_up(delivery) else "DO NOT keep up"
    print(f"readers {verdict} at {delivery.tokens_per_s:,.0f} tokens/s (target {TARGET_TOKENS_PER_S:,})")
