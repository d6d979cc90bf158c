"""Steps that no scheduler has sent: to do once what is done once, and to see what the largest step takes.

They know a worker's limits; what they compute is of no interest.
"""

from common.slot_sampling import SlotSampling
from common.step import SlotState, Step
from worker_svc.steps.step_limits import StepLimits

_GREEDY = SlotSampling(seed=0, temperature=0.0)
_NUM_DECODED = 2  # after the prompt of a warm-up


def warm_up_steps(limits: StepLimits) -> list[Step]:
    """A prompt, a decode step, and both in one with a copied block and ranked candidates; as far as limits allow."""
    held = min(limits.num_blocks * limits.block_size, limits.max_model_len)
    num_tokens = max(1, min(_prompt_tokens(limits), held - _NUM_DECODED, limits.max_batched_tokens - 1))
    table = list(range(min(limits.num_blocks, -(-(num_tokens + _NUM_DECODED) // limits.block_size))))
    first = _prompt(0, num_tokens, table, _GREEDY)
    steps = [Step(epoch=0, step_id=0, snapshot=True, whole=[first], rows=[0], num_tokens=[num_tokens])]
    if num_tokens + _NUM_DECODED > held:
        return steps
    steps.append(Step(epoch=0, step_id=1, rows=[0]))
    if limits.num_slots > 1 and num_tokens < limits.max_batched_tokens:
        steps.append(
            Step(
                epoch=0,
                step_id=2,
                whole=[_prompt(1, num_tokens, table, _everything(limits, seed=1))],
                copies=[0, limits.num_blocks - 1] if limits.num_blocks > 1 else (),
                rows=[0, 1],
                num_tokens=[1, num_tokens],
                samples=[1, 1],
                candidates=[0, min(2, limits.vocab_size)],
            )
        )
    return steps


def largest_step(limits: StepLimits) -> Step:
    """As many tokens as one step may compute, in as many slots, each sampled in the most laborious way."""
    counts = _most_tokens(limits)
    table = list(range(-(-max(counts) // limits.block_size)))  # of all rows: what they overwrite is not read again
    return Step(
        epoch=0,
        step_id=0,
        snapshot=True,
        whole=[_prompt(row, count, table, _everything(limits, seed=row)) for row, count in enumerate(counts)],
        rows=range(len(counts)),
        num_tokens=counts,
    )


def num_trial_blocks(limits: StepLimits) -> int:
    """Enough for the steps above, whatever number of blocks the limits name."""
    warm_up = _prompt_tokens(limits) + _NUM_DECODED
    return -(-max(*_most_tokens(limits), warm_up) // limits.block_size)


def _prompt_tokens(limits: StepLimits) -> int:
    """More than one, which would be a decode step."""
    return max(2, limits.block_size)


def _most_tokens(limits: StepLimits) -> list[int]:
    """Of each row, in as many rows as there can be."""
    num_rows = min(limits.num_slots, limits.max_batched_tokens)
    fewest, one_more = divmod(limits.max_batched_tokens, num_rows)
    return [min(fewest + (row < one_more), limits.max_model_len) for row in range(num_rows)]


def _prompt(slot: int, num_tokens: int, block_table: list[int], sampling: SlotSampling) -> SlotState:
    return SlotState(
        slot=slot,
        position=0,
        block_table=block_table,
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        sampling=sampling,
    )


def _everything(limits: StepLimits, seed: int) -> SlotSampling:
    return SlotSampling(
        seed=seed,
        temperature=0.8,
        top_k=min(50, limits.vocab_size),
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        num_logprobs=1,
        num_prompt_logprobs=1,
    )
