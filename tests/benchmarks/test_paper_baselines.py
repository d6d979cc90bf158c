"""Orca and FasterTransformer on traces small enough to follow by hand; the cost model against the figure behind it."""

import pytest

from benchmarks.paper.cost_model import CostModel, fitted, largest_residual_s
from benchmarks.paper.faster_transformer import FasterTransformer
from benchmarks.paper.orca import Orca, reserve_max, reserve_oracle, reserve_pow2
from benchmarks.paper.published import FIG1_THROUGHPUT
from benchmarks.paper.served_model import MODELS
from benchmarks.paper.trace import Request, Trace

# A step takes a second, each sequence in it and each prompt token more.
COSTS = CostModel(step_s=1.0, sequence_s=0.1, prompt_token_s=0.01)


def trace(*requests: Request, width: int = 1) -> Trace:
    return Trace(requests=list(requests), duration_s=1000.0, width=width)


def test_the_cost_model_is_near_every_point_of_fig_1() -> None:
    costs = fitted()
    assert (1e3 * costs.step_s, 1e3 * costs.sequence_s) == pytest.approx((26.24, 0.419), abs=0.005)
    assert 1e6 * costs.prompt_token_s == pytest.approx(153, abs=0.1)
    assert largest_residual_s(costs) < 0.7e-3
    assert all(batch / costs.of(batch, 0) == pytest.approx(rate, rel=0.03) for batch, rate in FIG1_THROUGHPUT.items())


def test_a_factor_slows_everything_down_alike() -> None:
    slower = fitted().scaled(1.17)
    assert slower.of(30, 500) == pytest.approx(1.17 * fitted().of(30, 500))
    assert slower.of_swap(3, 16) == pytest.approx(1.17 * fitted().of_swap(3, 16))


def test_the_slots_of_the_models_are_those_of_table_1() -> None:
    slots = [MODELS[name].num_slots for name in ("opt-13b", "opt-66b", "opt-175b")]
    assert slots == [15_728, 9_557, 60_074]  # printed: 15.7K, 9.7K, 60.1K


@pytest.mark.parametrize(
    ("num_input", "num_output", "pow2", "oracle"),
    [(100, 25, 132, 125), (100, 32, 132, 132), (100, 33, 164, 133), (1000, 1030, 2048, 2030), (7, 1, 8, 8)],
)
def test_what_is_reserved(num_input: int, num_output: int, pow2: int, oracle: int) -> None:
    request = Request(0.0, num_input, num_output)
    assert (reserve_max(request), reserve_pow2(request), reserve_oracle(request)) == (2048, pow2, oracle)


def test_orca_computes_a_prompt_beside_the_outputs_of_others() -> None:
    # 0 s: prompt of 10 and first token, 1.2 s. The second comes meanwhile; its prompt of 20 makes the next step
    # 1 + 0.2 + 0.2 = 1.4 s, after which the first has its 2 tokens. Then the second is alone: 1.1 s.
    outcome = Orca(4096, reserve_max, COSTS).serve(trace(Request(0.0, 10, 2), Request(0.5, 20, 2)))
    assert outcome.normalized_latency_s == pytest.approx(((1.2 + 1.4) / 2 + (1.2 + 1.4 + 1.1 - 0.5) / 2) / 2)
    assert (outcome.num_steps, outcome.num_batched) == (3, 4)


def test_orca_lets_a_request_wait_until_its_range_is_free() -> None:
    requests = [Request(0.0, 10, 5), Request(0.0, 10, 1)]
    outcome = Orca(2048, reserve_max, COSTS).serve(trace(*requests))
    assert outcome.mean_batch == 1.0
    first_s = 5 * 1.1 + 0.1
    assert outcome.normalized_latency_s == pytest.approx((first_s / 5 + first_s + 1.1 + 0.1) / 2)
    together = Orca(2048, reserve_oracle, COSTS).serve(trace(*requests))
    assert together.num_steps == 5 and together.num_batched == 6


def test_orca_knows_where_every_slot_is() -> None:
    # Input 2, output 3, a range of 8 slots in a pool of 16: the three steps see 2, 3 and 4 of them filled.
    memory = Orca(16, lambda _: 8, COSTS).serve(trace(Request(0.0, 2, 3))).memory
    assert (memory.pool, memory.filled, memory.reserved, memory.fragmented) == (48, 2 + 3 + 4, 3 + 2 + 1, 9)
    assert memory.percentages() == (18.75, 12.5, 18.75, 50.0)


def test_orcas_samples_share_nothing() -> None:
    alone = Orca(64, reserve_oracle, COSTS).serve(trace(Request(0.0, 8, 8), width=2))
    assert alone.memory.filled == 2 * sum(range(8, 16))
    with pytest.raises(AssertionError, match="all of the memory"):  # three samples of 32 slots never fit
        Orca(64, lambda _: 32, COSTS).serve(trace(Request(0.0, 8, 8), width=3))


def test_counting_iterations_at_once_changes_nothing() -> None:
    """Requests that come at every moment cut the same work into single iterations."""
    long_one = Request(0.0, 10, 50)
    later = [Request(0.3 + 1.1 * index, 1, 1) for index in range(40)]
    whole = Orca(2048, reserve_max, COSTS).serve(trace(long_one))
    cut = Orca(2048, reserve_max, COSTS).serve(trace(long_one, *later))
    assert whole.memory.filled == sum(range(10, 60))
    assert cut.num_steps == 50 + 40


def test_fastertransformer_takes_the_earliest_and_answers_all_at_the_end() -> None:
    # Two of three fit. First batch: 4 steps of 1.2 s and 30 prompt tokens, 5.1 s; then the third: 1.1 + 0.05 s.
    requests = [Request(0.0, 10, 4), Request(0.0, 20, 1), Request(0.0, 5, 1)]
    system = FasterTransformer(4100, 2048, COSTS)
    outcome = system.serve(trace(*requests))
    assert system.max_batch == 2
    assert outcome.normalized_latency_s == pytest.approx((5.1 / 4 + 5.1 + 5.1 + 1.15) / 3)
    assert (outcome.num_steps, outcome.num_batched) == (5, 9)


def test_fastertransformer_does_not_wait_for_a_full_batch() -> None:
    outcome = FasterTransformer(4100, 2048, COSTS).serve(trace(Request(0.0, 10, 1), Request(0.1, 10, 1)))
    assert outcome.num_steps == 2 and outcome.mean_batch == 1.0
