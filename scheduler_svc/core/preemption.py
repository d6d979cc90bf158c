"""Choice of how a group is preempted: its blocks are swapped to the host, or computed again later.

A pure function of the mode, the measured costs, and the blocks and tokens of the group.
"""

from dataclasses import dataclass, fields
from typing import Literal

PreemptionMode = Literal["auto", "swap", "recompute"]

# The speed of swaps is known only after one, so a worker makes up to so many for the measurement. One is enough if the
# worker measures; the bound is for workers that do not, and for swaps decided before the first is measured.
MAX_TRIAL_SWAPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionCosts:
    """Speeds and times measured from the steps of one worker, and from its fetches."""

    prefill_tokens_per_s: float
    prefill_step_tokens: float | None = None  # mean size of the measured steps; None: full ones
    swap_blocks_per_s: float | None = None  # in one direction; unknown before the first swap
    fetch_blocks_per_s: float | None = None  # from other workers; unknown before the first fetch
    decode_step_s: float | None = None  # of steps that only decode, lately; unknown before the first

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"{field.name} is {value}: give more than 0")


def prefers_swap(
    mode: PreemptionMode, costs: PreemptionCosts | None, num_swaps: int, num_blocks: int, num_tokens: int
) -> bool:
    """True if copying `num_blocks` out and in again is preferred to computing `num_tokens` again.

    `auto` without costs recomputes. With the speed of prefill alone it makes a few swaps, to measure them: `num_swaps`
    were made so far.
    """
    if mode != "auto":
        return mode == "swap"
    if costs is None:
        return False
    if costs.swap_blocks_per_s is None:
        return num_swaps < MAX_TRIAL_SWAPS
    return 2 * num_blocks / costs.swap_blocks_per_s < num_tokens / costs.prefill_tokens_per_s
