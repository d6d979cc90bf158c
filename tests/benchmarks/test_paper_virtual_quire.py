"""The real scheduler in virtual time; beams without a model; and the search for a rate."""

import pytest

from benchmarks.lengths import Lengths
from benchmarks.paper.capacity import capacity
from benchmarks.paper.cost_model import CostModel
from benchmarks.paper.other_lengths import CHATS, TRANSLATIONS, chat_lengths, translation_lengths
from benchmarks.paper.random_beams import RandomBeams, entropy
from benchmarks.paper.systems import serve
from benchmarks.paper.trace import Request, Trace, paper_lengths, poisson_trace
from benchmarks.paper.virtual_quire import QuireConfig, VirtualQuire

COSTS = CostModel(step_s=1.0, sequence_s=0.1, prompt_token_s=0.01, swap_token_s=0.001, swap_block_s=0.01)


def trace(*requests: Request, width: int = 1, num_prefix: int = 0) -> Trace:
    return Trace(requests=list(requests), duration_s=1000.0, width=width, num_prefix=num_prefix)


def test_a_request_takes_what_its_steps_cost() -> None:
    # As in the test of Orca: 1.2 s, 1.4 s, 1.1 s.
    outcome = VirtualQuire(QuireConfig(num_slots=1600), COSTS).serve(trace(Request(0.0, 10, 2), Request(0.5, 20, 2)))
    assert outcome.normalized_latency_s == pytest.approx(((1.2 + 1.4) / 2 + (1.2 + 1.4 + 1.1 - 0.5) / 2) / 2)
    assert (outcome.num_steps, outcome.num_batched) == (3, 4)


def test_samples_compute_their_prompt_once() -> None:
    # 1 + 0.3 + 0.1 for the prompt and the first tokens of three, 1.3 for each next one.
    outcome = VirtualQuire(QuireConfig(num_slots=1600), COSTS).serve(trace(Request(0.0, 10, 3), width=3))
    assert outcome.normalized_latency_s == pytest.approx((1.4 + 2 * 1.3) / 3)


def test_a_prefix_is_computed_once() -> None:
    requests = [Request(0.0, 32 + 5, 1), Request(50.0, 32 + 5, 1)]
    outcome = VirtualQuire(QuireConfig(num_slots=1600), COSTS).serve(trace(*requests, num_prefix=32))
    assert outcome.normalized_latency_s == pytest.approx(((1.1 + 0.37) + (1.1 + 0.05)) / 2)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_full_pool_preempts_and_everything_ends(preemption: str) -> None:
    requests = [Request(0.0, 30, 60) for _ in range(6)]  # 6 blocks of 16 each at the end; the pool has 20
    config = QuireConfig(num_slots=320, preemption="swap" if preemption == "swap" else "recompute")
    outcome = VirtualQuire(config, COSTS).serve(trace(*requests))
    assert outcome.num_requests == 6 and outcome.num_preemptions > 0


def test_the_same_requests_come_at_another_rate() -> None:
    slow = poisson_trace(paper_lengths("alpaca"), 1.0, 50.0)
    fast = poisson_trace(paper_lengths("alpaca"), 2.0, 25.0)
    assert slow.requests and len(slow.requests) == len(fast.requests)
    for one, other in zip(slow.requests, fast.requests, strict=True):
        assert one.arrival_s == pytest.approx(2 * other.arrival_s)
        assert (one.num_input, one.num_output) == (other.num_input, other.num_output)


def test_beams_share_more_than_samples() -> None:
    load = trace(*(Request(0.0, 16, 80) for _ in range(8)), width=4)
    beams = serve("quire", load, 4096, COSTS, beams=lambda: RandomBeams(4, 1, seed=1))
    samples = serve("quire", load, 4096, COSTS)
    assert beams.num_requests == samples.num_requests == 8
    assert beams.memory.filled < 0.7 * samples.memory.filled


def test_the_stated_entropies() -> None:
    assert [round(entropy(number), 2) for number in (1, 2, 6)] == [1.0, 1.5, 2.45]


def test_the_rate_is_found_from_either_side() -> None:
    rates = [capacity(lambda rate: 0.05 * rate**3, guess, 0.01).rate for guess in (0.3, 2.0, 9.0)]
    assert rates == pytest.approx([10 ** (1 / 3)] * 3, rel=0.002)


def test_the_points_of_the_search_are_kept_in_order() -> None:
    found = capacity(lambda rate: 0.1 * rate, 3.0, 0.01)
    assert found.points == sorted(found.points) and len(found.points) > 2
    assert found.points[0][1] < 0.5 < found.points[-1][1]


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_translations_are_of_the_stated_lengths(name: str) -> None:
    drawn = translation_lengths(name)(4000)
    wanted = TRANSLATIONS[name]
    assert sum(each.num_input for each in drawn) / 4000 == pytest.approx(wanted.num_input, rel=0.03)
    assert sum(each.num_output for each in drawn) / 4000 == pytest.approx(wanted.num_output, rel=0.03)


def test_a_chats_prompts_are_cut_to_1024_tokens() -> None:
    whole, in_rounds = (chat_lengths(name)(500) for name in CHATS)
    assert {each.num_input for each in whole} == {1024}
    assert max(each.num_input for each in in_rounds) == 1024 > min(each.num_input for each in in_rounds)
    assert all(isinstance(each, Lengths) and 1 <= each.num_output <= 1024 for each in [*whole, *in_rounds])
