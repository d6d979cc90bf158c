"""A scheduler in small: turns prompts into steps for a runner, with scattered blocks and chunked prompts.

It stands in for the scheduler in the worker's tests, and says what changed as the scheduler does.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from common.sampling_params import SequenceSampling
from common.step import SequenceState, Step, StepResult, StepStatus
from tests.worker.steps import GREEDY


@dataclass(slots=True)
class Sent:
    """Sequence as the client knows it."""

    seat: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SequenceSampling
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_sent: bool = False
    logprobs: list[float] = field(default_factory=list)
    top_token_ids: list[list[int]] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)  # by position

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class StepClient:
    """Makes steps and takes results; the caller carries them."""

    def __init__(self, *, num_blocks: int, block_size: int, seed: int = 0, epoch: int = 1) -> None:
        self.random = random.Random(seed)
        self.free_blocks = self.random.sample(range(num_blocks), num_blocks)
        self.block_size = block_size
        self.epoch = epoch
        self.step_id = 0
        self.sequences: list[Sent] = []

    def add(self, prompt: Iterable[int], sampling: SequenceSampling = GREEDY) -> Sent:
        tokens = list(prompt)
        sequence = Sent(len(self.sequences), tokens, len(tokens), sampling)
        self.sequences.append(sequence)
        return sequence

    def next_step(self, chunk: int, *, snapshot: bool = False) -> Step:
        """The next `chunk` tokens of every sequence; sequences not sent yet, or all with a snapshot, whole."""
        self.step_id += 1
        step = Step(epoch=self.epoch, step_id=self.step_id, snapshot=snapshot or self.step_id == 1)
        rows: list[int] = []
        num_tokens: list[int] = []
        samples: list[int] = []
        append_pairs: list[int] = []
        for sequence in self.random.sample(self.sequences, len(self.sequences)):
            count = min(chunk, len(sequence.token_ids) - sequence.num_computed)
            appended = self._grow(sequence, sequence.num_computed + count)
            if step.snapshot or not sequence.is_sent:
                step.whole.append(_state(sequence))
                sequence.is_sent = True
            else:
                append_pairs += [number for block in appended for number in (sequence.seat, block)]
            if sequence.num_computed + count == len(sequence.token_ids):
                samples += [len(rows), sequence.seat]
            rows.append(sequence.seat)
            num_tokens.append(count)
        return replace(step, rows=rows, num_tokens=num_tokens, samples=samples, append_pairs=append_pairs)

    def take(self, step: Step, result: StepResult) -> None:
        """Learns what was sampled."""
        assert result.status is StepStatus.OK, result.error
        assert not result.invalid_samples
        for seat, count in zip(step.rows, step.num_tokens, strict=True):
            self.sequences[seat].num_computed += count
        assert step.samples is not None
        for index, (seat, token_id) in enumerate(zip(step.samples[1::2], result.token_ids, strict=True)):
            self.sequences[seat].token_ids.append(token_id)
            if index in result.logprobs:
                self.sequences[seat].logprobs += result.logprobs[index].logprobs
                self.sequences[seat].top_token_ids.append(list(result.logprobs[index].top_token_ids))
        for part in result.prompt_logprobs:
            found = self.sequences[part.seat].prompt_logprobs
            found.update(enumerate(part.rows.logprobs, start=part.position))

    def outputs(self, num_tokens: int) -> list[list[int]]:
        return [sequence.output[:num_tokens] for sequence in self.sequences]

    def is_done(self, num_tokens: int) -> bool:
        return all(len(sequence.output) >= num_tokens for sequence in self.sequences)

    def _grow(self, sequence: Sent, num_tokens: int) -> Sequence[int]:
        missing = -(-num_tokens // self.block_size) - len(sequence.block_table)
        appended = [self.free_blocks.pop() for _ in range(missing)]
        sequence.block_table += appended
        return appended


def _state(sequence: Sent) -> SequenceState:
    done = sequence.num_computed
    return SequenceState(
        seat=sequence.seat,
        position=done,
        block_table=list(sequence.block_table),
        token_ids=sequence.token_ids[done:],
        history=sequence.token_ids[:done] if sequence.sampling.needs_history else (),
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=sequence.sampling,
    )
