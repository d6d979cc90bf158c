"""Orders a step's tokens: rows of one token first, then the longer ones.

So decode attention and prefill attention each have consecutive tokens. Pure arithmetic on rows, without tensors.
"""

from dataclasses import dataclass

import numpy as np

from worker_svc.steps.step_check import IntArray, StepRows


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """T tokens of R rows; the first `num_decode` tokens are rows of one token each."""

    order: IntArray  # [R] rows, in the order of their tokens
    num_decode: int
    token_seats: IntArray  # [T]
    positions: IntArray  # [T]
    first_tokens: IntArray  # [R] index among T of each row's first token, by row, not in order
    last_tokens: IntArray  # [R]

    @property
    def is_decode(self) -> bool:
        """True if every row has one token."""
        return self.num_decode == len(self.order)

    @property
    def prefill_rows(self) -> IntArray:
        """The rows of several tokens, in order."""
        return self.order[self.num_decode :]


def lay_out(rows: StepRows) -> BatchLayout:
    """Order the tokens of `rows`; rows of equal kind stay in the order of the step."""
    num_tokens = rows.num_tokens
    is_prefill = num_tokens > 1
    if not is_prefill.any():
        everywhere = np.arange(len(num_tokens))
        return BatchLayout(everywhere, len(num_tokens), rows.seats, rows.starts, everywhere, everywhere)
    order = np.argsort(is_prefill, kind="stable")
    counts = num_tokens[order]
    ends = np.cumsum(counts)
    last_tokens = np.empty_like(ends)
    last_tokens[order] = ends - 1
    first_tokens = last_tokens + 1 - num_tokens
    return BatchLayout(
        order=order,
        num_decode=int(len(order) - is_prefill.sum()),
        token_seats=np.repeat(rows.seats[order], counts),
        positions=np.arange(ends[-1]) + np.repeat(rows.starts[order] - (ends - counts), counts),
        first_tokens=first_tokens,
        last_tokens=last_tokens,
    )
