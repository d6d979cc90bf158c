"""Runs a decoder as `PagedRunner` does, by the accelerator's forward pass: seats, padding, rows of one token first.

It makes the device's tables anew for each step. Entries that no row should read are blocks far outside the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.cascade_groups import SharedPrefix, fill_cascade_arrays
from kernels.attention.cascade_reference import prefix_groups
from kernels.attention.decode_reference import DecodeRows
from kernels.attention.prefill_reference import PrefillRows
from kernels.layers.step_inputs_reference import SeatTables, StepInputs, empty_step_inputs
from tests.worker.paged_runner import PagedRunner, PagedSequence
from worker_svc.gpu.attention_plans import AttentionPlans, BatchAttention, DecodePlans, PrefillPlans
from worker_svc.gpu.forward import DeviceForward
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder
from worker_svc.operations import Operations

BAD_BLOCK = 2**31 - 1
BAD_SEAT = 2**30
MAX_ROWS = 16
PADDED_TO = 4  # rows of one token, as the batches of graphs are


@dataclass(frozen=True)
class Batch:
    """Tokens of a step: rows of one token first, then padding, then the others."""

    inputs: StepInputs
    attention: BatchAttention
    last_tokens: Tensor  # [R] int64, of each row


class DevicePagedRunner(PagedRunner):
    """One of the same seed as a `PagedRunner` takes the same blocks for the same sequences."""

    def __init__(
        self,
        decoder: Decoder,
        operations: Operations,
        *,
        num_blocks: int,
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(decoder, num_blocks=num_blocks, block_size=block_size)
        self.pool = KVPool(decoder.block_shape(block_size, kv_dtype), num_blocks, decoder.device)
        self.pool.blocks.fill_(float("nan"))
        self.forward = DeviceForward(decoder, self.pool, operations)
        self.plans = AttentionPlans(decoder, self.pool, operations, max_rows=MAX_ROWS, max_blocks=num_blocks)

    def compute(self, sequences: Sequence[PagedSequence], counts: Sequence[int]) -> Tensor:
        order = sorted(range(len(counts)), key=lambda row: counts[row] > 1)
        batch = self.lay_out([sequences[row] for row in order], [counts[row] for row in order])
        state = self.forward.forward(batch.inputs, batch.attention)
        logits = self.forward.logits(state, batch.last_tokens)
        in_order = torch.empty_like(logits)
        in_order[order] = logits
        return in_order.float()

    def lay_out(
        self, sequences: Sequence[PagedSequence], counts: Sequence[int], prefixes: Sequence[SharedPrefix] = ()
    ) -> Batch:
        """Lay out rows in order: those of one token come first, of which some may begin with the same blocks."""
        num_ones = list(counts).count(1)
        num_decode = -(-num_ones // PADDED_TO) * PADDED_TO
        padding = num_decode - num_ones
        starts = [sequence.num_computed_tokens for sequence in sequences]
        seats = [*range(num_ones), *[BAD_SEAT] * padding]
        positions = [*starts[:num_ones], *[-1] * padding]
        for row in range(num_ones, len(counts)):
            seats += [row] * counts[row]
            positions += range(starts[row], starts[row] + counts[row])
        inputs = empty_step_inputs(len(seats), num_decode, self.pool.num_blocks, self.decoder.device)
        self.plans.gather(self._tables(sequences), self._tensor(seats), self._tensor(positions), inputs)
        decode = self._decode_plans(inputs, num_decode, prefixes)
        prefill = self._prefill_plans(sequences[num_ones:], counts[num_ones:], num_decode)
        attention = BatchAttention(num_decode_tokens=num_decode, decode=decode, prefill=prefill)
        ends = torch.tensor(counts[num_ones:], dtype=torch.int64).cumsum(0) + num_decode
        last_tokens = torch.cat((torch.arange(num_ones), ends - 1)).to(self.decoder.device)
        return Batch(inputs, attention, last_tokens)

    def _decode_plans(self, inputs: StepInputs, num_rows: int, prefixes: Sequence[SharedPrefix]) -> DecodePlans:
        if not num_rows:
            return {}
        rows = DecodeRows(inputs.context_lens[:num_rows], inputs.block_tables)
        plans = self.plans.decode(rows)
        if prefixes:
            arrays = fill_cascade_arrays(prefixes, MAX_ROWS, self.pool.block_size)
            on_device = {name: torch.from_numpy(array).to(self.decoder.device) for name, array in arrays.items()}
            plans = self.plans.cascade(rows, prefix_groups(on_device, num_rows))
        self.plans.fill(plans)
        return plans

    def _prefill_plans(
        self, sequences: Sequence[PagedSequence], counts: Sequence[int], num_before: int
    ) -> PrefillPlans:
        if not counts:
            return {}
        query_lens = torch.tensor(counts)
        contexts = query_lens + torch.tensor([sequence.num_computed_tokens for sequence in sequences])
        work = self.plans.prefill_work(query_lens.numpy(), contexts.numpy())
        rows = PrefillRows(
            query_start=self._tensor([num_before, *(num_before + query_lens.cumsum(0)).tolist()]),
            context_lens=self._tensor(contexts.tolist()),
            block_tables=self._tables(sequences).block_tables,
        )
        return self.plans.prefill(rows, [torch.from_numpy(fields).to(self.decoder.device) for fields in work])

    def sharing_sequences(self, num_sharers: int, num_shared_blocks: int) -> list[PagedSequence]:
        """Make sequences with the same first blocks and one without; all but the last token of each is computed."""
        size = self.pool.block_size
        shared = [5 + token % 13 for token in range(num_shared_blocks * size)]
        blocks = [self.free_blocks.pop() for _ in range(num_shared_blocks)]
        self.step([PagedSequence(list(shared), len(shared), blocks)], len(shared))
        sequences = [
            PagedSequence([*shared, *range(20, 22 + 3 * row)], 0, list(blocks), len(shared))
            for row in range(num_sharers)
        ]
        sequences.append(PagedSequence([7, *shared[:9]], 0))
        for sequence in sequences:
            self.step([sequence], len(sequence.token_ids))
            self._grow(sequence, len(sequence.token_ids))
        return sequences

    def _tables(self, sequences: Sequence[PagedSequence]) -> SeatTables:
        longest = max(len(sequence.token_ids) for sequence in sequences)
        token_ids = torch.full((len(sequences), longest + 1), -1, dtype=torch.int32)
        blocks = torch.full((len(sequences), self.pool.num_blocks), BAD_BLOCK, dtype=torch.int32)
        for seat, sequence in enumerate(sequences):
            token_ids[seat, : len(sequence.token_ids)] = torch.tensor(sequence.token_ids)
            blocks[seat, : len(sequence.block_table)] = torch.tensor(sequence.block_table)
        return SeatTables(token_ids.to(self.decoder.device), blocks.to(self.decoder.device))

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.decoder.device)
