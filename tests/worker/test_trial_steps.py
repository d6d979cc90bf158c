"""The steps of a start are steps that a worker takes, whatever its limits."""

from dataclasses import replace

import numpy as np
import pytest

from common.sampling_params import NUMERIC_PARAMS
from common.step import Step
from tests.worker.steps import LIMITS
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import CheckedStep
from worker_svc.steps.step_fence import StepFence
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.trial_steps import largest_step, num_trial_blocks, warm_up_steps

TIGHT = [
    LIMITS,
    replace(LIMITS, block_size=1, num_blocks=1),
    replace(LIMITS, block_size=1, max_batched_tokens=1),
    replace(LIMITS, num_blocks=1, num_host_blocks=0),
    replace(LIMITS, num_seats=1),
    replace(LIMITS, max_batched_tokens=5, num_seats=4),
    replace(LIMITS, max_batched_tokens=17, num_seats=4),  # the first seat has a token and a block more than the others
    replace(LIMITS, max_batched_tokens=500),  # more than 8 sequences of 40 tokens
    replace(LIMITS, max_model_len=1),
    replace(LIMITS, max_model_len=3, block_size=256, vocab_size=1),
]


def take(steps: list[Step], limits: StepLimits) -> list[CheckedStep]:
    """Take steps as an executor and its runner do; each sample is token 0."""
    table, fence = SeatTable(limits), StepFence()
    taken = []
    for step in steps:
        assert fence.refusal(step) is None
        fence.record_executed(step)
        taken.append(table.apply(step))
        table.advance(taken[-1].rows, np.zeros(len(taken[-1].rows.sample_seats), dtype=np.int64))
    return taken


@pytest.mark.parametrize("limits", TIGHT)
def test_every_worker_can_take_the_steps_of_its_start(limits: StepLimits) -> None:
    assert take(warm_up_steps(limits), limits)
    trial = replace(limits, num_blocks=num_trial_blocks(limits))
    assert take([*warm_up_steps(trial), largest_step(trial)], trial)


def test_a_warm_up_has_a_prompt_a_decode_step_and_both_together_with_a_copy_and_candidates() -> None:
    prompt, decode, mixed = take(warm_up_steps(LIMITS), LIMITS)
    assert prompt.rows.num_tokens.tolist() == [4]
    assert decode.rows.num_tokens.tolist() == [1]
    assert mixed.rows.num_tokens.tolist() == [1, 4]
    assert mixed.copies == [(0, 31)]
    assert (mixed.rows.candidate_rows.tolist(), mixed.rows.sample_rows.tolist()) == ([0], [1])


@pytest.mark.parametrize(
    ("limits", "num_tokens", "copies"),
    [
        (replace(LIMITS, num_blocks=2), 4, [(0, 1)]),
        (replace(LIMITS, num_blocks=1), 2, []),  # a block cannot be copied to another
        (replace(LIMITS, num_seats=2, max_batched_tokens=5, max_model_len=6), 4, [(0, 31)]),
        (replace(LIMITS, max_batched_tokens=4), 3, [(0, 31)]),
        (replace(LIMITS, max_model_len=3), 1, [(0, 31)]),
        (replace(LIMITS, block_size=1), 2, [(0, 31)]),  # a row of one token is a decode row
    ],
)
def test_a_warm_up_has_all_three_steps_where_they_just_fit(
    limits: StepLimits, num_tokens: int, copies: list[tuple[int, int]]
) -> None:
    taken = take(warm_up_steps(limits), limits)
    assert [step.rows.num_tokens.tolist() for step in taken] == [[num_tokens], [1], [1, num_tokens]]
    assert [step.copies for step in taken] == [[], [], copies]


@pytest.mark.parametrize(
    ("limits", "num_steps"),
    [
        (replace(LIMITS, max_model_len=2), 1),
        (replace(LIMITS, num_blocks=2, block_size=1), 1),
        (replace(LIMITS, num_seats=1), 2),
        (replace(LIMITS, max_batched_tokens=1), 2),
    ],
)
def test_a_warm_up_leaves_out_the_steps_that_do_not_fit(limits: StepLimits, num_steps: int) -> None:
    assert len(take(warm_up_steps(limits), limits)) == num_steps


def test_every_sampling_parameter_has_effect_in_a_seat_of_the_warm_up_and_in_all_of_the_largest_step() -> None:
    last = warm_up_steps(LIMITS)[-1]
    for state in [*last.whole, *largest_step(LIMITS).whole]:
        assert all(getattr(state.sampling, each.name) != each.default for each in NUMERIC_PARAMS)
        assert state.sampling.num_logprobs and state.sampling.num_prompt_logprobs


def test_the_largest_step_has_all_tokens_and_all_seats_and_needs_few_blocks() -> None:
    limits = replace(LIMITS, num_blocks=num_trial_blocks(LIMITS))
    assert limits.num_blocks == 2  # 3 tokens a seat, and the warm-up's 6 tokens, in blocks of 4
    (taken,) = take([largest_step(limits)], limits)
    assert taken.rows.num_tokens.tolist() == [3] * 8
    assert len(taken.rows.sample_seats) == 8


def test_the_largest_step_keeps_to_the_longest_sequence() -> None:
    limits = replace(LIMITS, num_seats=2, max_batched_tokens=100)
    assert largest_step(limits).num_tokens == [40, 40]
