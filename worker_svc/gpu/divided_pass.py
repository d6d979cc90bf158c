"""Parts of a pass that depend on how the decoder is divided among ranks: look-ups, sums, norms over all heads, logits.

With the whole decoder each is the plain operation. Everything is queued on the current stream, in the same order on all
ranks, and can be captured in a graph. Knows no layers.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from kernels.native.shared_ranks import RankReduction
from worker_svc.model.decoder import Decoder


class DividedPass:
    """One decoder's part in its passes. `ranks`: the group among which it is divided; None: it is whole."""

    def __init__(self, decoder: Decoder, ranks: RankReduction | None) -> None:
        assert (ranks is None) == decoder.model_part.is_whole, "a part is computed by a group"
        self._part = decoder.model_part
        self._vocab_size = decoder.config.vocab_size
        self._ranks = ranks

    def look_up(self, table: Tensor, ids: Tensor, total: int) -> Tensor:
        """Rows [T, size] of a table with `total` rows, of which `table` has this rank's; zeros for those of others."""
        if self._ranks is None:
            return F.embedding(ids, table)
        places = ids - self._part.span_of(total).begin
        is_own = (places >= 0) & (places < len(table))
        return F.embedding(places * is_own, table) * is_own.unsqueeze(1)

    def summed(self, x: Tensor) -> Tensor:
        """Sum of x over the ranks, in place."""
        if self._ranks is not None:
            self._ranks.sum_rows(x)
        return x

    def norm_of_all(self, norm: Callable[[Tensor], Tensor], own: Tensor) -> Tensor:
        """Norm of rows [T, total] of which ranks have columns [T, own]; returns this rank's."""
        if self._ranks is None:
            return norm(own)
        num_rows, size = own.shape
        every = own.new_empty((num_rows, size * self._ranks.size))
        self._ranks.join_columns(own, every)
        return norm(every)[:, self._ranks.rank * size : (self._ranks.rank + 1) * size]

    def logits(self, own: Tensor) -> Tensor:
        """Logits [L, vocab_size] of which ranks have columns. All ranks get them, with the same bits, and sample."""
        if self._ranks is None:
            return own
        joined = own.new_empty((len(own), self._vocab_size))
        self._ranks.join_columns(own, joined)
        return joined
