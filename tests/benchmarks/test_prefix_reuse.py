"""A shared prefix on real services is computed once; the benchmark summarises its figures."""

import pytest

from benchmarks.memory.prefix_reuse import (
    OUTPUT_TOKENS,
    OWN_TOKENS,
    PREFIX_TOKENS,
    Case,
    Outcome,
    Request,
    is_computed_once,
    measure,
    median_of,
    outcome_of,
    report,
)

NUM_FIRST = PREFIX_TOKENS + OUTPUT_TOKENS - 1  # computed of the request before all
NUM_OWN = OWN_TOKENS + OUTPUT_TOKENS - 1


def made_up(case: Case, num_prefixes: int) -> Outcome:
    """Later requests see their first token after 2 and 4 ms."""
    requests = [
        Request(first_token_s=0.001 * each, cached_tokens=0 if each == 9 else PREFIX_TOKENS) for each in (9, 2, 4)
    ]
    num_computed = NUM_FIRST + 3 * NUM_OWN + num_prefixes * PREFIX_TOKENS
    return outcome_of(case, requests, num_computed=num_computed, hit_tokens=2 * PREFIX_TOKENS, all_s=0.05)


@pytest.mark.long
def test_64_requests_that_come_at_once_compute_their_prefix_once() -> None:
    outcome = measure(Case(cache="automatic", arrival="at once"))
    assert outcome.num_prefix_computations == 1
    assert outcome.num_requests_that_found_all == 63
    assert outcome.prefix_hit_tokens == 63 * PREFIX_TOKENS


@pytest.mark.long
def test_a_pinned_prefix_is_computed_for_its_pin_alone() -> None:
    outcome = measure(Case(cache="pinned", arrival="in turn", num_requests=3))
    assert (outcome.num_prefix_computations, outcome.num_requests_that_found_all) == (1, 3)


@pytest.mark.long
def test_without_a_cache_every_request_computes_the_prefix() -> None:
    outcome = measure(Case(cache="none", arrival="in turn", num_requests=3))
    assert (outcome.num_prefix_computations, outcome.prefix_hit_tokens) == (3, 0)


def test_what_a_case_computes_beyond_the_requests_own_tokens_is_the_prefix() -> None:
    outcome = made_up(Case(cache="none", arrival="in turn", num_requests=3), num_prefixes=3)
    assert outcome.num_prefix_computations == 3
    assert outcome.num_requests_that_found_all == 2
    assert (outcome.first_ttft_ms, outcome.later_ttft_p50_ms, outcome.later_ttft_p90_ms) == (9.0, 2.0, 4.0)


def test_a_prefix_that_is_computed_twice_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    kept = Case(cache="automatic", arrival="at once", num_requests=3)
    not_kept = Case(cache="none", arrival="at once", num_requests=3)
    good = {kept: made_up(kept, 1), not_kept: made_up(not_kept, 3)}
    assert is_computed_once(good)
    bad = {kept: median_of([made_up(kept, 2), made_up(kept, 1), made_up(kept, 2)])}
    assert not is_computed_once(bad)
    report(bad)
    assert "NOT computed once" in capsys.readouterr().out
