"""Input of a forward pass: the rows of one iteration as tensors.

It names the tokens to compute and the places of their keys and values; it knows no sequences and no seats.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.attention.paged_attention import RaggedRows


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The rows of one iteration, ragged and concatenated: T tokens over R rows."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, block_id * block_size + offset: where each token's K and V are written
    query_start: Tensor  # [R + 1] int32 cumulative
    context_lens: Tensor  # [R] int32, tokens in the cache once this step is written
    block_tables: Tensor  # [R, max_blocks] int32, padded with 0
    logit_rows: Tensor  # [L] int64, indices into T whose logits are wanted
    max_query_len: int
    max_context_len: int

    @property
    def rows(self) -> RaggedRows:
        """The same rows as attention sees them."""
        return RaggedRows(
            query_start=self.query_start,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            max_query_len=self.max_query_len,
            max_context_len=self.max_context_len,
        )
