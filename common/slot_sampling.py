"""Sampling parameters of one slot on a worker.

The scheduler settles them once per sequence from the client's parameters and sends them with the slot's state.
They hold nothing of stop strings, tenants or text.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSampling:
    """Sampling parameters of one slot, in the order in which they act on a row of logits.

    Allowed and suppressed ids, then bias, penalties, temperature, min-p, top-k, top-p, noise.
    Allowed ids are always stored as int32: there may be 65,536 of them for each of 128 samples.
    """

    seed: int  # uint64
    sample_index: int = 0
    allowed_token_ids: Sequence[int] | None = None
    suppressed_token_ids: tuple[int, ...] = ()  # barred while the sampled position is below suppressed_until
    suppressed_until: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    temperature: float = 1.0  # 0 is greedy
    min_p: float = 0.0  # 0 is off
    top_k: int | None = None
    top_p: float = 1.0  # 1 is off
    num_logprobs: int | None = None  # None: none; 0: the sampled token's; k: and the k most likely
    num_prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        token_ids = self.allowed_token_ids
        if token_ids is not None and not isinstance(token_ids, array):
            object.__setattr__(self, "allowed_token_ids", array("i", token_ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """True if penalties are on, so that the worker needs the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
