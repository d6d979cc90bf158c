"""A rank of a group by itself, for launches that are recorded and not run: the other ranks' numbers do not matter."""

from torch import Tensor


class LoneRank:
    """Sums and joins of which the other ranks' parts are zero. A `RankReduction`."""

    has_failed = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum_rows(self, x: Tensor) -> None:
        """See RankReduction."""

    def join_columns(self, x: Tensor, out: Tensor) -> None:
        """See RankReduction."""
        begin = self.rank * -(-out.shape[1] // self.size)
        own = x.clone()
        out.zero_()
        out[:, begin : begin + own.shape[1]] = own

    def collect_columns(self, x: Tensor, out: Tensor | None, total: int) -> None:
        """See RankReduction."""
        if out is not None:
            self.join_columns(x, out)

    def fail(self) -> None:
        """See RankReduction. Nobody waits."""
