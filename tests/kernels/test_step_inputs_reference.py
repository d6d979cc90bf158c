"""Inputs of a step's tokens: the torch reference against a plain loop."""

import pytest
import torch

from kernels.layers.step_inputs_reference import SeatTables, empty_step_inputs, step_inputs

TABLES = SeatTables(
    token_ids=torch.arange(100, 100 + 3 * 20, dtype=torch.int32).view(3, 20),
    block_tables=torch.tensor([[4, 9, 2], [2**27, 0, 2**31 - 1], [7, 7, 1]], dtype=torch.int32),
)


@pytest.mark.parametrize("block_size", [5, 8])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_every_token_has_what_its_seat_has_at_its_position(block_size: int, dtype: torch.dtype) -> None:
    tokens = [(2, 0), (0, block_size - 1), (1, block_size), (1, 1), (0, 2 * block_size)]
    seats, positions = torch.tensor(tokens, dtype=dtype).unbind(1)
    inputs = empty_step_inputs(5, 2, 3, torch.device("cpu"))
    step_inputs(TABLES, seats, positions, block_size, inputs)
    assert inputs.token_ids.tolist() == [100 + 20 * seat + position for seat, position in tokens]
    assert inputs.positions.tolist() == [position for _, position in tokens]
    assert inputs.context_lens.tolist() == [position + 1 for _, position in tokens]
    assert inputs.slot_mapping.tolist() == [
        int(TABLES.block_tables[seat, position // block_size]) * block_size + position % block_size
        for seat, position in tokens
    ]
    assert torch.equal(inputs.block_tables, TABLES.block_tables[[2, 0]])


def test_padding_is_a_token_of_no_seat() -> None:
    seats, positions = torch.tensor([-7, 1, 2**30]), torch.tensor([-1, 3, -1])
    inputs = empty_step_inputs(3, 0, 0, torch.device("cpu"))
    step_inputs(TABLES, seats, positions, 8, inputs)
    assert inputs.token_ids.tolist() == [0, 123, 0]
    assert inputs.positions.tolist() == [0, 3, 0]
    assert inputs.context_lens.tolist() == [0, 4, 0]
    assert inputs.slot_mapping.tolist() == [-1, 2**30 + 3, -1]


def test_the_first_tokens_of_larger_inputs_are_views_of_these() -> None:
    larger = empty_step_inputs(4, 3, 3, torch.device("cpu"))
    seats, positions = torch.tensor([0, 2]), torch.tensor([1, 9])
    step_inputs(TABLES, seats, positions, 8, larger.first(2, 1))
    assert larger.token_ids.tolist() == [101, 149, 0, 0]
    assert larger.slot_mapping.tolist() == [4 * 8 + 1, 7 * 8 + 1, -1, -1]
    assert larger.block_tables.tolist() == [[4, 9, 2], [0, 0, 0], [0, 0, 0]]
