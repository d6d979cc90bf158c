"""The benchmarks of routing run in small, and judge what they found."""

from dataclasses import asdict

import pytest

from benchmarks.scale import routing_hits, routing_speed
from benchmarks.scale.routing_hits import Answered, HitCase, HitRow, measure_case, row_of


@pytest.mark.long
@pytest.mark.timeout(240)
def test_client_and_gateway_are_measured_before_real_servers() -> None:
    rows = routing_speed.measure(None, rounds=1, seconds=0.3)
    assert [(row.system, row.prompt_bytes) for row in rows] == [
        (system, size) for size in routing_speed.SIZES for system in ("client", "gateway")
    ]
    assert all(row.per_s > 0 and row.cpu_us > 0 for row in rows)
    assert all((row.choice_us is not None) == (row.system == "client") for row in rows)


@pytest.mark.parametrize(("per_s", "is_met"), [(1200.0, True), (900.0, False)])
def test_the_speed_of_a_client_is_judged(per_s: float, is_met: bool) -> None:
    speed = routing_speed.Speed(
        system="client", prompt_bytes=2048, per_s=per_s, cpu_us=300.0, choice_us=20.0, rounds=[per_s]
    )
    section = routing_speed.section_of({"shards": 4, "at_once": 64, "rounds": 1, "rows": [asdict(speed)]})
    assert ("not met" not in section.verdict) == is_met and f"{per_s:,.0f} requests/s" in section.headlines[0].figure


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_case_of_hits_runs_with_real_processes() -> None:
    row = measure_case(HitCase(shards=4, policy="in turn", clients=2), rate=20.0, seconds=1.5)
    assert row.requests > 10 and 0 <= row.hit_rate <= row.endless_hit_rate < 1 and row.first_token_p50_ms > 0


def test_an_endless_cache_has_each_prefix_from_its_first_request_on() -> None:
    answered = [
        Answered(sent_s=sent_s, prefix=prefix, prompt_tokens=2048, cached_tokens=cached, first_token_s=0.01)
        for sent_s, prefix, cached in ((3.0, 1, 512), (1.0, 1, 0), (2.0, 2, 0), (4.0, 2, 1024))
    ]
    row = row_of(HitCase(shards=4, policy="by prefix", clients=1), answered)
    assert (row.requests, row.hit_rate, row.endless_hit_rate) == (4, 0.1875, 0.25)
    assert row.share == 0.75 and row.first_token_p99_ms == 10.0


@pytest.mark.parametrize(("hit_rate", "is_met"), [(0.8, True), (0.7, False)])
def test_hits_are_judged_against_the_endless_cache(hit_rate: float, is_met: bool) -> None:
    def row(policy: routing_hits.Policy, hits: float, first_ms: float) -> HitRow:
        return HitRow(
            shards=4, policy=policy, clients=2, requests=100, hit_rate=hits, endless_hit_rate=0.8,
            first_token_p50_ms=first_ms, first_token_p90_ms=first_ms, first_token_p99_ms=first_ms,
        )  # fmt: skip

    rows = [row("by prefix", hit_rate, 20.0), row("in turn", 0.4, 40.0)]
    shape = {"prefixes": 50, "workers": 4, "prefix_tokens": 1024, "own_tokens": 64, "blocks": 2048}
    load = {"step_ms": 4.0, "token_us": 100.0, "rate": 24.0}
    section = routing_hits.section_of({**shape, **load, "rows": [asdict(each) for each in rows]})
    assert ("not met" not in section.verdict) == is_met and "-50% against in turn" in section.headlines[0].figure
