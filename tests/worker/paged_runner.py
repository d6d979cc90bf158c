"""Runs a decoder over a paged pool the hard way: scattered blocks, poisoned slots, chunks mixed with decode rows.

It stands in for scheduler and executor in the decoder's tests. Blocks are written only through the slot mapping,
and what no token wrote is NaN, or in int8 has such a scale.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kernels.native.torch_kernels import TorchKernels
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.batch import ForwardBatch
from worker_svc.model.decoder import Decoder

_POISON = 255  # in every byte: NaN in any floating-point dtype


@dataclass(slots=True)
class PagedSequence:
    """Tokens, how many of them are in the cache, and the blocks that hold those."""

    token_ids: list[int]
    num_prompt_tokens: int
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class PagedRunner:
    """A decoder, its pool, and the free blocks in random order."""

    def __init__(
        self,
        decoder: Decoder | HostDecoder,
        *,
        num_blocks: int,
        block_size: int,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.decoder = decoder if isinstance(decoder, HostDecoder) else HostDecoder(decoder, TorchKernels())
        self.random = random.Random(seed)
        self.pool = KVPool(decoder.block_shape(block_size, kv_dtype), num_blocks, decoder.device)
        self._bytes = self.pool.blocks.view(torch.uint8)
        self._bytes.fill_(_POISON)
        self.free_blocks = self.random.sample(range(num_blocks), num_blocks)
        self.num_mixed_steps = 0  # that had both chunks of prompts and decode rows

    def generate(
        self, prompts: Iterable[Sequence[int]], num_tokens: int, *, batch_size: int, chunk: int
    ) -> list[list[int]]:
        """Greedy tokens; at most one new sequence joins in each step, and computes at most `chunk` tokens."""
        sequences = [PagedSequence(list(prompt), len(prompt)) for prompt in prompts]
        waiting = list(sequences)
        running: list[PagedSequence] = []
        while waiting or running:
            if waiting and len(running) < batch_size:
                running.append(waiting.pop(0))
            self.random.shuffle(running)
            self.step(running, chunk)
            for sequence in [s for s in running if len(s.output) == num_tokens]:
                running.remove(sequence)
                self.release(sequence)
        return [sequence.output for sequence in sequences]

    def step(self, sequences: Sequence[PagedSequence], chunk: int) -> torch.Tensor:
        """Compute up to `chunk` tokens of each, append the best next token where a sequence is complete."""
        counts = [min(chunk, len(s.token_ids) - s.num_computed_tokens) for s in sequences]
        self.num_mixed_steps += 1 in counts and max(counts) > 1
        for sequence, count in zip(sequences, counts, strict=True):
            self._grow(sequence, sequence.num_computed_tokens + count)
        logits = self.compute(sequences, counts)
        for sequence, count, row in zip(sequences, counts, logits, strict=True):
            sequence.num_computed_tokens += count
            if sequence.num_computed_tokens == len(sequence.token_ids):
                sequence.token_ids.append(int(row.argmax()))
        return logits

    def compute(self, sequences: Sequence[PagedSequence], counts: Sequence[int]) -> torch.Tensor:
        """Logits of the last of the next `counts` tokens of each, in float32."""
        return self.decoder.forward(forward_batch(sequences, counts, self.pool.block_size), self.pool).float()

    def release(self, sequence: PagedSequence) -> None:
        """Free the blocks, poisoned again."""
        self._bytes[sequence.block_table] = _POISON
        self.free_blocks.extend(sequence.block_table)
        self.random.shuffle(self.free_blocks)

    def _grow(self, sequence: PagedSequence, num_tokens: int) -> None:
        while len(sequence.block_table) * self.pool.block_size < num_tokens:
            sequence.block_table.append(self.free_blocks.pop())


def reference_logits(decoder: Decoder, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
    """Logits [L, vocab_size] in float32, by the kernels' references in torch."""
    return HostDecoder(decoder, TorchKernels()).forward(batch, pool).float()


def forward_batch(
    sequences: Sequence[PagedSequence], counts: Sequence[int], block_size: int, *, all_logits: bool = False
) -> ForwardBatch:
    """The batch that computes the next `counts` tokens of each; logits of each row's last token, or of all."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for sequence, count in zip(sequences, counts, strict=True):
        span = range(sequence.num_computed_tokens, sequence.num_computed_tokens + count)
        token_ids += [sequence.token_ids[position] for position in span]
        positions += span
        slots += [sequence.block_table[p // block_size] * block_size + p % block_size for p in span]
        starts.append(starts[-1] + count)
    contexts = [s.num_computed_tokens + count for s, count in zip(sequences, counts, strict=True)]
    width = max(len(s.block_table) for s in sequences)
    tables = [s.block_table + [0] * (width - len(s.block_table)) for s in sequences]
    logit_rows = range(len(token_ids)) if all_logits else [start - 1 for start in starts[1:]]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        logit_rows=torch.tensor(list(logit_rows)),
        max_query_len=max(counts),
        max_context_len=max(contexts),
    )
