"""Inputs of a forward pass for each token, gathered from the tables of all seats: types and the torch reference.

Knows seats, positions and blocks, no model. The kernel with the same signature is in `step_inputs`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class SeatTables(NamedTuple):
    """Tokens and block tables of all seats, on the device."""

    token_ids: Tensor  # [num_seats, any] int32, by position
    block_tables: Tensor  # [num_seats, max_blocks] int32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """T tokens, of which the first R are rows of one token with their block tables; R may be 0."""

    token_ids: Tensor  # [T] int64; 0 for padding, which also has position 0
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, block_id * block_size + offset; -1 for padding, which is not written
    context_lens: Tensor  # [T] int32, position + 1; 0 for padding
    block_tables: Tensor  # [R, max_blocks] int32; entries beyond a token's own block have no defined content

    def first(self, num_tokens: int, num_rows: int) -> "StepInputs":
        """Views for fewer tokens and rows."""
        return StepInputs(
            token_ids=self.token_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mapping[:num_tokens],
            context_lens=self.context_lens[:num_tokens],
            block_tables=self.block_tables[:num_rows],
        )


def empty_step_inputs(num_tokens: int, num_rows: int, max_blocks: int, device: torch.device) -> StepInputs:
    """Unfilled memory for `step_inputs`."""
    return StepInputs(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        context_lens=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        block_tables=torch.zeros((num_rows, max_blocks), dtype=torch.int32, device=device),
    )


def step_inputs(tables: SeatTables, seats: Tensor, positions: Tensor, block_size: int, inputs: StepInputs) -> None:
    """Fill `inputs` for the tokens at `positions` of `seats`.

    seats:     [T] int32 or int64; any number where the position is negative
    positions: [T] int32 or int64; negative for padding
    inputs:    of T tokens; block tables may be narrower than those of the seats, if the tokens' own blocks are in them
    """
    is_token = positions >= 0
    rows = seats.to(torch.int64).where(is_token, 0)
    places = positions.to(torch.int64).where(is_token, 0)
    columns, offsets = places // block_size, places % block_size
    inputs.token_ids.copy_(tables.token_ids[rows, places].where(is_token, 0))
    inputs.positions.copy_(places)
    slot_mapping = tables.block_tables[rows, columns].to(torch.int64) * block_size + offsets
    inputs.slot_mapping.copy_(slot_mapping.where(is_token, -1))
    inputs.context_lens.copy_((positions + 1).where(is_token, 0))
    num_rows, width = inputs.block_tables.shape
    inputs.block_tables.copy_(tables.block_tables[:, :width].index_select(0, rows[:num_rows]))
