"""The steps of a start are steps that a worker takes, whatever its limits."""

from dataclasses import replace

import numpy as np
import pytest

from common.step import Step
from tests.worker.steps import LIMITS
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import CheckedStep
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.trial_steps import largest_step, num_trial_blocks, warm_up_steps

TIGHT = [
    LIMITS,
    replace(LIMITS, block_size=1, num_blocks=1),
    replace(LIMITS, block_size=1, max_batched_tokens=1),
    replace(LIMITS, num_blocks=1, num_host_blocks=0),
    replace(LIMITS, num_seats=1),
    replace(LIMITS, max_batched_tokens=5, num_seats=4),
    replace(LIMITS, max_batched_tokens=500),  # more than 8 sequences of 40 tokens
    replace(LIMITS, max_model_len=1),
    replace(LIMITS, max_model_len=3, block_size=256, vocab_size=1),
]


def take(steps: list[Step], limits: StepLimits) -> list[CheckedStep]:
    """Take steps as a runner does; each sample is token 0."""
    table = SeatTable(limits)
    taken = []
    for step in steps:
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


def test_the_largest_step_has_all_tokens_and_all_seats_and_needs_few_blocks() -> None:
    limits = replace(LIMITS, num_blocks=num_trial_blocks(LIMITS))
    assert limits.num_blocks == 2  # 3 tokens a seat, and the warm-up's 6 tokens, in blocks of 4
    (taken,) = take([largest_step(limits)], limits)
    assert taken.rows.num_tokens.tolist() == [3] * 8
    assert len(taken.rows.sample_seats) == 8


def test_the_largest_step_keeps_to_the_longest_sequence() -> None:
    limits = replace(LIMITS, num_seats=2, max_batched_tokens=100)
    assert largest_step(limits).num_tokens == [40, 40]
