"""Steps that a worker executes at its start: to warm up, and to measure the memory of the largest step.

They fit the worker's limits; their results are dropped.
"""

from typing import Any

from common.sampling_params import NUMERIC_PARAMS, SequenceSampling
from common.step import SequenceState, Step
from worker_svc.steps.step_limits import StepLimits

_GREEDY = SequenceSampling(seed=0, temperature=0.0)
_NUM_DECODED = 2  # after the prompt of a warm-up


def warm_up_steps(limits: StepLimits) -> list[Step]:
    """A prompt, a decode step, and both in one with a copied block and ranked candidates, as far as limits allow."""
    held = min(limits.num_blocks * limits.block_size, limits.max_model_len)
    num_tokens = max(1, min(_prompt_tokens(limits), held - _NUM_DECODED, limits.max_batched_tokens - 1))
    table = list(range(min(limits.num_blocks, -(-(num_tokens + _NUM_DECODED) // limits.block_size))))
    first = _prompt(0, num_tokens, table, _GREEDY)
    steps = [Step(epoch=0, step_id=0, snapshot=True, whole=[first], rows=[0], num_tokens=[num_tokens])]
    if num_tokens + _NUM_DECODED > held:
        return steps
    steps.append(Step(epoch=0, step_id=1, rows=[0]))
    if limits.num_seats > 1 and num_tokens < limits.max_batched_tokens:
        steps.append(
            Step(
                epoch=0,
                step_id=2,
                whole=[_prompt(1, num_tokens, table, _everything(seed=1))],
                copies=[0, limits.num_blocks - 1] if limits.num_blocks > 1 else (),
                rows=[0, 1],
                num_tokens=[1, num_tokens],
                samples=[1, 1],
                candidates=[0, 2],  # of a smaller vocabulary all
            )
        )
    return steps


def largest_step(limits: StepLimits) -> Step:
    """A step with the most tokens in the most seats, each with the most expensive sampling."""
    counts = _most_tokens(limits)
    table = list(range(-(-max(counts) // limits.block_size)))  # shared by all rows: none reads what another overwrites
    return Step(
        epoch=0,
        step_id=0,
        snapshot=True,
        whole=[_prompt(row, count, table, _everything(seed=row)) for row, count in enumerate(counts)],
        rows=range(len(counts)),
        num_tokens=counts,
    )


def num_trial_blocks(limits: StepLimits) -> int:
    """Blocks that the steps above need, regardless of `limits.num_blocks`."""
    warm_up = _prompt_tokens(limits) + _NUM_DECODED
    return -(-max(*_most_tokens(limits), warm_up) // limits.block_size)


def _prompt_tokens(limits: StepLimits) -> int:
    """Tokens of the warm-up prompt: at least 2, since a row of 1 is a decode row."""
    return max(2, limits.block_size)


def _most_tokens(limits: StepLimits) -> list[int]:
    """The most tokens of each row, in the most rows that a step can have."""
    num_rows = min(limits.num_seats, limits.max_batched_tokens)
    fewest, one_more = divmod(limits.max_batched_tokens, num_rows)
    return [min(fewest + (row < one_more), limits.max_model_len) for row in range(num_rows)]


def _prompt(seat: int, num_tokens: int, block_table: list[int], sampling: SequenceSampling) -> SequenceState:
    return SequenceState(
        seat=seat,
        position=0,
        block_table=block_table,
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        sampling=sampling,
    )


def _everything(seed: int) -> SequenceSampling:
    numbers: dict[str, Any] = {each.name: each.trial for each in NUMERIC_PARAMS}
    return SequenceSampling(seed=seed, num_logprobs=1, num_prompt_logprobs=1, **numbers)
