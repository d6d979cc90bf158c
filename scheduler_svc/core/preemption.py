"""How a group gives way: its blocks are swapped to the host, or computed again later.

A pure function of the mode, what was measured, and what the group holds.
"""

from dataclasses import dataclass
from typing import Literal

PreemptionMode = Literal["auto", "swap", "recompute"]

# Without a swap nobody learns how fast one is: so many of a worker are made for the sake of it. One is enough where the
# worker measures; the bound is for those that do not, and for the swaps decided before the first is measured.
MAX_TRIAL_SWAPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionCosts:
    """As learnt from the steps of one worker."""

    prefill_tokens_per_s: float
    prefill_step_tokens: float | None = None  # in a step from which that was learnt, on average; None: a full one
    swap_blocks_per_s: float | None = None  # in one direction; unknown before the first swap

    def __post_init__(self) -> None:
        for name in ("swap_blocks_per_s", "prefill_tokens_per_s", "prefill_step_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}: give more than 0")


def prefers_swap(
    mode: PreemptionMode, costs: PreemptionCosts | None, num_swaps: int, num_blocks: int, num_tokens: int
) -> bool:
    """`num_blocks` would be copied out and in again, or `num_tokens` computed again; `num_swaps` were made so far.

    `auto` without costs recomputes; with the speed of prefill alone it tries a few swaps, whose speed is then known.
    """
    if mode != "auto":
        return mode == "swap"
    if costs is None:
        return False
    if costs.swap_blocks_per_s is None:
        return num_swaps < MAX_TRIAL_SWAPS
    return 2 * num_blocks / costs.swap_blocks_per_s < num_tokens / costs.prefill_tokens_per_s
