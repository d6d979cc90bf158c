"""What a worker can do in one step, in numbers, and the refusal of a step that asks for something else."""

from dataclasses import dataclass


class InvalidStepError(ValueError):
    """The step contradicts itself or the worker's limits. Nothing of it was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The worker's limits; `Describe` tells them to the scheduler."""

    num_slots: int
    num_blocks: int
    num_host_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int
    max_batched_tokens: int

    @property
    def max_blocks(self) -> int:
        """The longest block table: that of the longest sequence and a token not yet known."""
        return self.max_model_len // self.block_size + 1
