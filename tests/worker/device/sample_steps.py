"""Steps for a runner that hold most of what a decode step can: samples that share blocks, penalties, a greedy row."""

from dataclasses import replace

from common.sampling_params import SequenceSampling
from common.step import Step, StepResult
from tests.worker.steps import GREEDY, seat_state
from tests.worker.tiny_models import random_prompts

PROMPT = random_prompts([9], seed=3)[0]
DRAWN = SequenceSampling(seed=11, temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.2, num_logprobs=2)


def decode_steps(num_steps: int) -> list[Step]:
    """A prompt for three samples that penalise what they have said, and a greedy one, which says no token by itself."""
    samplings = [replace(DRAWN, sample_index=index) for index in range(3)]
    first = seat_state(0, PROMPT, [10, 11, 12], sampling=samplings[0])
    at_its_end = {"position": 9, "num_prompt_tokens": 9, "history": PROMPT}
    others = [seat_state(seat, [], [10, 11], sampling=samplings[seat], **at_its_end) for seat in (1, 2)]
    greedy = seat_state(3, PROMPT[:3], [50, 51, 52, 53], sampling=GREEDY)
    steps = [Step(epoch=1, step_id=1, snapshot=True, whole=[first, *others, greedy], rows=[0, 3])]
    steps[0].num_tokens = [9, 3]
    steps[0].samples = [0, 0, 0, 1, 0, 2, 1, 3]
    free = iter(range(20, 50))
    for position in range(9, 9 + num_steps):
        step = Step(epoch=1, step_id=len(steps) + 1, rows=[2, 0, 3, 1])
        if position == 9:
            step.copies = [12, 20, 12, 21]
            step.append_pairs = [1, next(free), 2, next(free)]
        elif position % 4 == 0:
            step.append_pairs = [number for seat in range(3) for number in (seat, next(free))]
        steps.append(step)
    return steps


def comparable(result: StepResult) -> tuple[object, ...]:
    rows = {index: (list(row.ranks), list(row.top_token_ids)) for index, row in result.logprobs.items()}
    return list(result.token_ids), rows
