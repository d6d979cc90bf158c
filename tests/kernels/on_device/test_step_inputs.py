"""Inputs of a step's tokens, gathered by kernel, against the torch reference."""

import pytest
import torch

from kernels.layers import step_inputs, step_inputs_reference
from kernels.layers.step_inputs_reference import SeatTables, StepInputs, empty_step_inputs
from tests.kernels.on_device.devices import DEVICE

UNDEFINED = -77


def random_tables(num_seats: int, num_tokens: int, max_blocks: int, num_blocks: int = 2**27) -> SeatTables:
    """Draw tables with block ids whose slots need more than 32 bits."""
    generator = torch.Generator().manual_seed(num_tokens)
    token_ids = torch.randint(152_000, (num_seats, num_tokens), generator=generator, dtype=torch.int32)
    blocks = torch.randint(num_blocks, (num_seats, max_blocks), generator=generator, dtype=torch.int32)
    return SeatTables(token_ids.to(DEVICE), blocks.to(DEVICE))


def poisoned_inputs(num_tokens: int, num_rows: int, width: int) -> StepInputs:
    inputs = empty_step_inputs(num_tokens, num_rows, width, DEVICE)
    for tensor in (
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.context_lens,
        inputs.block_tables,
    ):
        tensor.fill_(UNDEFINED)
    return inputs


def check(tables: SeatTables, seats: torch.Tensor, positions: torch.Tensor, block_size: int, num_rows: int) -> None:
    width = tables.block_tables.shape[1]
    inputs, expected = (poisoned_inputs(len(seats), num_rows, width) for _ in range(2))
    step_inputs.step_inputs(tables, seats, positions, block_size, inputs)
    step_inputs_reference.step_inputs(tables, seats, positions, block_size, expected)
    assert torch.equal(inputs.token_ids, expected.token_ids)
    assert torch.equal(inputs.positions, expected.positions)
    assert torch.equal(inputs.slot_mapping, expected.slot_mapping)
    assert torch.equal(inputs.context_lens, expected.context_lens)
    for row, context in enumerate(expected.context_lens[:num_rows].tolist()):
        used = -(-context // block_size)
        assert torch.equal(inputs.block_tables[row, :used], expected.block_tables[row, :used])
        assert (inputs.block_tables[row, used:] == UNDEFINED).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("block_size", [1, 12, 16])
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (7, 0), (130, 3), (256, 9)])
def test_tokens_and_tables_are_those_of_their_seats(
    num_tokens: int, num_rows: int, block_size: int, dtype: torch.dtype
) -> None:
    tables = random_tables(9, 40 * block_size, 41)
    generator = torch.Generator().manual_seed(num_tokens)
    seats = torch.randint(9, (num_tokens,), generator=generator, dtype=dtype)
    positions = torch.randint(40 * block_size, (num_tokens,), generator=generator, dtype=dtype)
    positions[: min(num_tokens, 3)] = torch.tensor([block_size - 1, block_size, 0])[: min(num_tokens, 3)]
    check(tables, seats.to(DEVICE), positions.to(DEVICE), block_size, num_rows)


def test_padding_reads_no_seat_and_is_written_nowhere() -> None:
    tables = random_tables(4, 50, 4)
    seats = torch.tensor([3, 2**30, -5, 1], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([49, -1, -1, 0], dtype=torch.int32, device=DEVICE)
    check(tables, seats, positions, 16, 4)
    inputs = poisoned_inputs(4, 4, 4)
    step_inputs.step_inputs(tables, seats, positions, 16, inputs)
    assert inputs.token_ids[1:3].tolist() == inputs.positions[1:3].tolist() == [0, 0]
    assert inputs.slot_mapping[1:3].tolist() == [-1, -1]
    assert inputs.context_lens.tolist() == [50, 0, 0, 1]


def test_tables_may_be_longer_than_one_program_copies() -> None:
    tables = random_tables(2, 3000, 3000)
    seats = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([2999, 1023, 1024], dtype=torch.int32, device=DEVICE)
    check(tables, seats, positions, 1, 3)


def test_inputs_may_be_part_of_larger_ones_with_narrower_tables() -> None:
    tables = random_tables(3, 100, 50)
    larger = poisoned_inputs(8, 6, 5)
    seats = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([9, 4, 0], dtype=torch.int32, device=DEVICE)
    step_inputs.step_inputs(tables, seats, positions, 2, larger.first(3, 2))
    assert torch.equal(larger.block_tables[0], tables.block_tables[2, :5])
    assert torch.equal(larger.block_tables[1, :3], tables.block_tables[0, :3])
    assert (larger.block_tables[2:] == UNDEFINED).all()
    assert (larger.token_ids[3:] == UNDEFINED).all()
    assert larger.slot_mapping[:3].tolist() == [
        int(tables.block_tables[2, 4]) * 2 + 1,
        int(tables.block_tables[0, 2]) * 2,
        int(tables.block_tables[1, 0]) * 2,
    ]


def test_seats_beyond_the_reach_of_32_bits_are_read() -> None:
    """Seat 17 begins 17 * 2^27 elements behind the first, which is past 2^31. On a CPU most of it is never touched."""
    width = 2**27
    token_ids = torch.empty(18 * width, dtype=torch.int32, device=DEVICE).view(18, width)
    token_ids[17, 3] = 123
    blocks = torch.full((18, 4), 9, dtype=torch.int32, device=DEVICE)
    seats = torch.tensor([17], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    inputs = poisoned_inputs(1, 1, 4)
    step_inputs.step_inputs(SeatTables(token_ids, blocks), seats, positions, 4, inputs)
    assert inputs.token_ids.tolist() == [123]


def test_no_tokens_are_nothing_to_do() -> None:
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    step_inputs.step_inputs(random_tables(2, 4, 4), none, none, 4, poisoned_inputs(0, 0, 4))
