"""Runs, conclusions and plot of the decision benchmark."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from benchmarks.scale.schedule_cost import (
    NUM_TOKENS,
    Cost,
    DecodeLoop,
    Workload,
    groups_of,
    growth_of,
    is_no_worse_than_linear,
    is_within_budget,
    measure,
    plot,
    report,
)
from benchmarks.svg_chart import Line, log_log_chart

SVG = "{http://www.w3.org/2000/svg}"
COST = Cost(
    workload="single",
    batch=16,
    schedule_p50_ms=0.01,
    schedule_p99_ms=0.02,
    schedule_wall_p50_ms=0.01,
    schedule_p50_us_per_sequence=0.6,
    apply_p50_ms=0.01,
    apply_p99_ms=0.01,
    offer_p50_ms=0.01,
    offer_p99_ms=0.01,
)


def growing(exponent: float) -> list[Cost]:
    return [replace(COST, batch=16 * 2**n, schedule_p50_ms=0.01 * 2 ** (n * exponent)) for n in range(5)]


@pytest.mark.parametrize(("workload", "sizes"), [("single", [1] * 16), ("mixed", [1, 1, 1, 1, 4] * 2)])
def test_a_workload_has_as_many_sequences_as_asked(workload: Workload, sizes: list[int]) -> None:
    groups = list(groups_of(workload, 16, max_tokens=5))
    assert [len(group.sequences) for group in groups] == sizes
    prompts = [group.sequences[0].token_ids for group in groups]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == len(groups)
    assert all(NUM_TOKENS - 16 < len(prompt) <= NUM_TOKENS for prompt in prompts)


def test_every_step_decodes_all_sequences_and_one_of_sixteen_gets_a_block() -> None:
    loop = DecodeLoop("single", 32, max_steps=40)
    first = loop.step()
    assert sum(first.num_tokens) > 31 * NUM_TOKENS
    for _ in range(32):
        plan = loop.step()
        assert plan.num_tokens == [1] * 32
        assert len(plan.append_pairs) == 2 * 32 // 16
    loop.check()


def test_a_small_run_measures_calls(capsys: pytest.CaptureFixture[str]) -> None:
    costs = [measure(workload, batch, 20) for workload in ("single", "mixed") for batch in (16, 32)]
    assert all(cost.schedule_p99_ms >= cost.schedule_p50_ms > 0 for cost in costs)
    report(costs)
    assert "budget" in capsys.readouterr().out
    ET.fromstring(plot(costs))


def test_growth_is_an_exponent() -> None:
    assert growth_of(growing(1.5)) == pytest.approx(1.5)
    assert is_no_worse_than_linear(growing(1.0)) and not is_no_worse_than_linear(growing(1.2))


def test_the_budget_is_for_one_batch() -> None:
    assert is_within_budget([replace(COST, batch=512, schedule_p50_ms=0.9)])
    assert not is_within_budget([replace(COST, batch=256, schedule_p50_ms=0.5)])


def test_equal_factors_are_equal_distances_in_the_chart() -> None:
    line = Line("a < b", [(16, 0.01), (64, 0.1), (256, 1.0)])
    chart = ET.fromstring(log_log_chart("title", "x", "y", [line]))
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in chart.iter(f"{SVG}circle")]
    (x1, y1), (x2, y2), (x3, y3) = dots
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2) and x2 > x1
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2) and y1 > y2
    assert "a < b" in [text.text for text in chart.iter(f"{SVG}text")]
