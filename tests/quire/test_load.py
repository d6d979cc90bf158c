"""The synthetic load and what is measured of it; arithmetic stands beside the numbers."""

import itertools
import random

import pytest

from quire.cli.load import Lengths, Load
from quire.cli.measurements import Measurement, Percentiles, summarize


def load(**changes: object) -> Load:
    given: dict[str, object] = {
        "rate": 50.0,
        "num_requests": 2000,
        "duration_s": None,
        "output_len": Lengths.parse("5-9"),
        "prompt_len": Lengths.parse("3"),
        "prompt": None,
        "seed": 1,
    }
    return Load(**{**given, **changes})  # type: ignore[arg-type]


def test_the_same_seed_plans_the_same_load() -> None:
    assert load().plan(100, []) == load().plan(100, [])
    assert load().plan(100, []) != load(seed=2).plan(100, [])


def test_arrivals_come_at_the_rate_and_unevenly() -> None:
    times = [each.at_s for each in load().plan(100, [])]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean_s = sum(gaps) / len(gaps)
    variance = sum((gap - mean_s) ** 2 for gap in gaps) / len(gaps)
    assert mean_s == pytest.approx(1 / 50, rel=0.1)
    assert variance == pytest.approx(mean_s**2, rel=0.2)  # of an exponential distribution


def test_lengths_and_prompts_are_as_asked() -> None:
    planned = load(prompt_len=Lengths.parse("normal:20:4")).plan(10, [0, 1])
    assert {each.max_tokens for each in planned} == {5, 6, 7, 8, 9}
    assert {token for each in planned for token in each.prompt} == set(range(2, 10))  # 0 and 1 are barred
    lengths = [len(each.prompt) for each in planned]
    assert sum(lengths) / len(lengths) == pytest.approx(20, abs=0.5)


def test_a_duration_ends_the_arrivals_and_an_infinite_rate_makes_them_one_moment() -> None:
    planned = load(num_requests=None, duration_s=2.0).plan(100, [])
    assert 70 < len(planned) < 130  # 50 a second for 2 s
    assert max(each.at_s for each in planned) < 2.0
    assert {each.at_s for each in load(rate=float("inf"), num_requests=5).plan(100, [])} == {0.0}


def test_a_given_prompt_is_used_as_it_is() -> None:
    assert {each.prompt for each in load(prompt="Hello", num_requests=3).plan(100, [])} == {"Hello"}


def test_a_normal_length_is_never_below_one() -> None:
    assert min(Lengths.parse("normal:1:9").draw(random.Random(0)) for _ in range(3)) >= 1


@pytest.mark.parametrize("text", ["", "0", "9-3", "a", "normal:3", "-4", "1.5"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a length"):
        Lengths.parse(text)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(i) for i in range(1, 101)]
    assert Percentiles.of(values) == Percentiles(mean=50.5, p50=50.0, p90=90.0, p99=99.0)
    assert Percentiles.of([3.0]) == Percentiles(mean=3.0, p50=3.0, p90=3.0, p99=3.0)
    assert Percentiles.of([]) is None


def test_a_summary_counts_tokens_of_all_and_latencies_of_the_completed() -> None:
    done = Measurement(
        num_prompt_tokens=7, num_output_tokens=5, num_cached_tokens=2, first_token_s=0.5, last_token_s=2.5, end_s=3.0
    )
    single = Measurement(num_prompt_tokens=1, num_output_tokens=1, first_token_s=1.5, last_token_s=1.5, end_s=1.5)
    failed = Measurement(num_output_tokens=4, first_token_s=0.1, end_s=9.0, failure="OverloadedError")
    summary = summarize([done, single, failed], duration_s=2.0)

    assert (summary.num_requests, summary.num_completed, summary.failures) == (3, 2, {"OverloadedError": 1})
    assert summary.output_tokens_per_s == 5.0  # (5 + 1 + 4) / 2
    assert summary.requests_per_s == 1.0
    assert summary.cached_tokens == 2
    assert summary.time_to_first_token_s == Percentiles(mean=1.0, p50=0.5, p90=1.5, p99=1.5)
    assert summary.time_per_output_token_s == Percentiles(mean=0.5, p50=0.5, p90=0.5, p99=0.5)  # (2.5 - 0.5) / 4
    assert summary.saving is None
    assert summary.normalized_latency_s is not None
    assert summary.normalized_latency_s.mean == pytest.approx((3.0 / 5 + 1.5 / 1) / 2)


def test_latencies_per_token_count_the_length_of_a_sample() -> None:
    several = Measurement(
        num_output_tokens=12, num_samples=3, first_token_s=0.5, last_token_s=3.5, end_s=4.0, saving=0.25
    )
    assert several.time_per_output_token_s == 1.0  # (3.5 - 0.5) / (12 / 3 - 1)
    assert several.normalized_latency_s == 1.0  # 4.0 / (12 / 3)
    single = Measurement(num_output_tokens=1, end_s=1.0, saving=0.75)
    assert summarize([several, single], duration_s=1.0).saving == 0.5
