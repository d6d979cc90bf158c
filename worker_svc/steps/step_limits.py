"""Limits of a worker for one step, and the error for a step that breaks them."""

from dataclasses import dataclass


class InvalidStepError(ValueError):
    """The step contradicts itself or the worker's limits. No part of it was executed."""


class MissingBlocksError(ValueError):
    """The step places blocks that this worker has not fetched. No part of it was executed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The worker's limits, part of its answer to `Describe`."""

    num_seats: int
    num_blocks: int
    num_host_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int
    max_batched_tokens: int

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence and one token that is not yet known."""
        return self.max_model_len // self.block_size + 1
