"""Shorthand for what the worker's tests are full of: limits, seats and steps."""

from collections.abc import Sequence
from typing import Any

from common.sampling_params import SequenceSampling
from common.step import SequenceState
from worker_svc.steps.step_limits import StepLimits

GREEDY = SequenceSampling(seed=0, temperature=0.0)

LIMITS = StepLimits(
    num_seats=8,
    num_blocks=32,
    num_host_blocks=4,
    block_size=4,
    vocab_size=100,
    max_model_len=40,
    max_batched_tokens=24,
)


def seat_state(seat: int, token_ids: Sequence[int], block_table: Sequence[int], **fields: Any) -> SequenceState:
    """A greedy sequence from its beginning, all of it prompt, unless `fields` say otherwise."""
    fields = {"position": 0, "num_prompt_tokens": len(token_ids), "sampling": GREEDY, **fields}
    return SequenceState(seat=seat, token_ids=token_ids, block_table=block_table, **fields)
