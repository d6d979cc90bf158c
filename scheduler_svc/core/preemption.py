"""How a group gives way: its blocks are swapped to the host, or computed again later.

A pure function of the mode, what was measured, and what the group holds.
"""

from dataclasses import dataclass
from typing import Literal

PreemptionMode = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionCosts:
    """As learnt from the steps of one worker."""

    swap_blocks_per_s: float  # in one direction
    prefill_tokens_per_s: float

    def __post_init__(self) -> None:
        for name in ("swap_blocks_per_s", "prefill_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give more than 0")


def prefers_swap(mode: PreemptionMode, costs: PreemptionCosts | None, num_blocks: int, num_tokens: int) -> bool:
    """`num_blocks` would be copied out and in again, or `num_tokens` computed again. Without costs: recompute."""
    if mode != "auto":
        return mode == "swap"
    if costs is None:
        return False
    return 2 * num_blocks / costs.swap_blocks_per_s < num_tokens / costs.prefill_tokens_per_s
