"""Gathers a forward pass's inputs for each token from the tables of all seats, in one launch.

So the host sends only a seat and a position for each token, and a captured graph finds the rest. The torch reference is
`kernels.layers.step_inputs_reference.step_inputs`. Knows seats, positions and blocks, no model.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.layers.step_inputs_reference import SeatTables, StepInputs

TOKENS = 128  # per program
BLOCKS = 1024  # of a row's table per program
NUM_WARPS = 4


# Strides go with the longest sequence, which a worker may shorten between its trial and its start.
@triton.jit(
    do_not_specialize=[
        "tokens_stride",
        "blocks_stride",
        "row_stride",
        "width",
        "num_tokens",
        "num_token_programs",
        "num_parts",
    ]
)
def step_inputs_kernel(
    table_tokens_ptr: tl.tensor,  # [num_seats, any] int32
    table_blocks_ptr: tl.tensor,  # [num_seats, max_blocks] int32
    seats_ptr: tl.tensor,  # [T] int32 or int64
    positions_ptr: tl.tensor,  # [T] int32 or int64
    token_ids_ptr: tl.tensor,  # [T] int64
    out_positions_ptr: tl.tensor,  # [T] int64
    slot_mapping_ptr: tl.tensor,  # [T] int64
    context_lens_ptr: tl.tensor,  # [T] int32
    row_blocks_ptr: tl.tensor,  # [R, width] int32
    tokens_stride: tl.tensor,  # from seat to seat
    blocks_stride: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    num_tokens: tl.tensor,
    num_token_programs: tl.tensor,
    num_parts: tl.tensor,  # of a row's table
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Inputs of tokens and block tables of rows.

    The first programs: token = table_tokens[seat, position] and its other inputs, for TOKENS tokens each.
    The others: row_blocks[i] = table_blocks[seats[i]], up to the block of positions[i], BLOCKS entries each.
    """
    i_program = tl.program_id(0)
    if i_program < num_token_programs:
        o_token = i_program * TOKENS + tl.arange(0, TOKENS)
        m_token = o_token < num_tokens
        b_position = tl.load(positions_ptr + o_token, mask=m_token, other=-1).to(tl.int64)
        m_real = b_position >= 0
        b_seat = tl.load(seats_ptr + o_token, mask=m_real, other=0).to(tl.int64)
        p_block = table_blocks_ptr + b_seat * blocks_stride + b_position // BLOCK_SIZE
        b_token = tl.load(table_tokens_ptr + b_seat * tokens_stride + b_position, mask=m_real, other=0)
        b_block = tl.load(p_block, mask=m_real, other=0).to(tl.int64)
        b_place = b_block * BLOCK_SIZE + b_position % BLOCK_SIZE
        tl.store(token_ids_ptr + o_token, b_token.to(tl.int64), mask=m_token)
        tl.store(out_positions_ptr + o_token, tl.maximum(b_position, 0), mask=m_token)
        tl.store(slot_mapping_ptr + o_token, tl.where(m_real, b_place, -1), mask=m_token)
        tl.store(context_lens_ptr + o_token, tl.where(m_real, b_position + 1, 0).to(tl.int32), mask=m_token)
    else:
        i_row = ((i_program - num_token_programs) // num_parts).to(tl.int64)
        i_part = (i_program - num_token_programs) % num_parts
        i_position = tl.load(positions_ptr + i_row).to(tl.int64)
        if i_position >= 0:
            i_seat = tl.load(seats_ptr + i_row).to(tl.int64)
            o_block = i_part * BLOCKS + tl.arange(0, BLOCKS)
            m_block = (o_block <= i_position // BLOCK_SIZE) & (o_block < width)
            b_block = tl.load(table_blocks_ptr + i_seat * blocks_stride + o_block, mask=m_block, other=0)
            tl.store(row_blocks_ptr + i_row * row_stride + o_block, b_block, mask=m_block)


def step_inputs(tables: SeatTables, seats: Tensor, positions: Tensor, block_size: int, inputs: StepInputs) -> None:
    """Fill `inputs` for the tokens at `positions` of `seats`. Queues one launch, without waiting.

    seats:     [T] int32 or int64; any number where the position is negative
    positions: [T] int32 or int64; negative for padding
    inputs:    of T tokens; block tables may be narrower than those of the seats, if the tokens' own blocks are in them
    """
    num_tokens = len(positions)
    num_rows, width = inputs.block_tables.shape
    assert len(seats) == len(inputs.token_ids) == num_tokens >= num_rows, "not the inputs of these tokens"
    assert tables.token_ids.stride(1) == tables.block_tables.stride(1) == 1, "a seat's entries must be contiguous"
    assert num_rows == 0 or inputs.block_tables.stride(1) == 1, "a row's entries must be contiguous"
    assert seats.is_contiguous()
    assert positions.is_contiguous()
    if num_tokens == 0:
        return
    num_token_programs, num_parts = triton.cdiv(num_tokens, TOKENS), triton.cdiv(width, BLOCKS)
    step_inputs_kernel[(num_token_programs + num_rows * num_parts,)](
        tables.token_ids,
        tables.block_tables,
        seats,
        positions,
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.context_lens,
        inputs.block_tables,
        tables.token_ids.stride(0),
        tables.block_tables.stride(0),
        inputs.block_tables.stride(0),
        width,
        num_tokens,
        num_token_programs,
        num_parts,
        BLOCK_SIZE=block_size,
        TOKENS=TOKENS,
        BLOCKS=BLOCKS,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
