"""Choice between fetching blocks from another worker and computing their tokens.

A pure function of the mode, the measured speeds and times, and the blocks and tokens.
"""

from typing import Literal

FetchMode = Literal["auto", "always", "never"]

# The speed of fetches is known only after one, so a worker makes up to so many for the measurement.
MAX_TRIAL_FETCHES = 4
MIN_TRIAL_BLOCKS = 4  # of a fetch for the measurement


def prefers_fetch(
    mode: FetchMode,
    prefill_tokens_per_s: float | None,
    fetch_blocks_per_s: float | None,
    num_fetches: int,
    num_blocks: int,
    num_tokens: int,
    placing_s: float = 0.0,
) -> bool:
    """True if fetching `num_blocks` is preferred to computing their `num_tokens`.

    `auto` computes while the speed of prefill is unknown. With it, it makes a few fetches to measure their speed:
    `num_fetches` were made so far. `placing_s`: for which the group waits for steps that place what has come.
    """
    if mode != "auto":
        return mode == "always"
    if prefill_tokens_per_s is None:
        return False
    if fetch_blocks_per_s is None:
        return num_fetches < MAX_TRIAL_FETCHES and num_blocks >= MIN_TRIAL_BLOCKS
    return num_blocks / fetch_blocks_per_s + placing_s < num_tokens / prefill_tokens_per_s
