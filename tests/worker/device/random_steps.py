"""Random steps that hold all that steps can, each a snapshot; they fit the limits, and their tokens mean nothing."""

from dataclasses import dataclass
from random import Random

from common.sampling_params import SequenceSampling
from common.step import SequenceState, Step
from tests.worker.steps import seat_state
from worker_svc.steps.step_limits import StepLimits


@dataclass(frozen=True, slots=True)
class RandomSteps:
    """Each replaces all seats, so that any step may follow any other."""

    random: Random
    limits: StepLimits

    def step(self, step_id: int) -> Step:
        """Prompts, chunks of them, decode rows that may begin alike, and what else a step has."""
        random, limits = self.random, self.limits
        num_rows = round(limits.num_seats ** random.random())
        share_prompts = random.choice([0, 0, 0.3, 1])
        budget = limits.max_batched_tokens
        whole, rows, num_tokens, ended = [], [], [], []
        for row, seat in enumerate(random.sample(range(limits.num_seats), num_rows)):
            room = budget - (num_rows - row - 1)
            count = random.randint(1, min(room, 60)) if random.random() < share_prompts else 1
            unseen = random.choice([0, 0, 5]) if count > 1 else 0  # of a prompt, left for later steps
            whole.append(self._state(seat, count, unseen))
            rows.append(seat)
            num_tokens.append(count)
            budget -= count
            if not unseen:
                ended.append(row)
        ranked = [row for row in ended if random.random() < random.choice([0, 0, 0.5])]
        samples = [number for row in ended if row not in ranked for number in (row, rows[row])]
        step = Step(epoch=0, step_id=step_id, snapshot=True, whole=whole, rows=rows, num_tokens=num_tokens)
        step.samples = samples
        step.candidates = [number for row in ranked for number in (row, random.randint(1, 8))]
        step.copies = self._pairs(limits.num_blocks, limits.num_blocks)
        step.swap_out = self._pairs(limits.num_blocks, limits.num_host_blocks)
        step.swap_in = self._pairs(limits.num_host_blocks, limits.num_blocks)
        return step

    def _state(self, seat: int, count: int, unseen: int) -> SequenceState:
        random, limits = self.random, self.limits
        position = random.choice([0, 0, random.randint(0, limits.max_model_len - count - unseen)])
        if count == 1:
            position = random.randint(1, limits.max_model_len - 1)
        known = position + count + unseen
        num_blocks = -(-known // limits.block_size)
        num_shared = random.choice([0, num_blocks, num_blocks // 2])
        table = [*range(num_shared), *random.sample(range(8, limits.num_blocks), num_blocks - num_shared)]
        return seat_state(
            seat,
            self._tokens(count + unseen),
            table,
            position=position,
            history=self._tokens(position),
            num_prompt_tokens=known if count > 1 else position,
            sampling=self._sampling(count),
        )

    def _sampling(self, count: int) -> SequenceSampling:
        random = self.random
        if random.random() < 0.4:
            return SequenceSampling(seed=0, temperature=0.0)
        return SequenceSampling(
            seed=random.randint(0, 99),
            temperature=random.choice([0.0, 0.5, 1.0]),
            top_k=random.choice([None, 1, 40]),
            top_p=random.choice([1.0, 0.9]),
            min_p=random.choice([0.0, 0.05]),
            repetition_penalty=random.choice([1.0, 1.0, 1.2]),
            frequency_penalty=random.choice([0.0, 0.0, 0.1]),
            num_logprobs=random.choice([None, None, 3]),
            num_prompt_logprobs=random.choice([None, 2]) if count > 1 else None,
            logit_bias=random.choice([(), ((5, 1.0),)]),
            suppressed_token_ids=random.choice([(), (7,)]),
            suppressed_until=1000,
            allowed_token_ids=random.choice([None, None, (1, 2, 3)]),
        )

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.limits.vocab_size) for _ in range(count)]

    def _pairs(self, num_sources: int, num_destinations: int) -> list[int]:
        num_pairs = self.random.choice([0, 0, 1, 5])
        destinations = self.random.sample(range(num_destinations), num_pairs)
        return [number for each in destinations for number in (self.random.randrange(num_sources), each)]
