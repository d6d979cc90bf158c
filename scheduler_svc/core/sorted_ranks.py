"""Sorted ranks, with a quick count of how many are below a given one.

Knows nothing of groups. Equal ranks are counted each.
"""

from bisect import bisect_left, insort

Rank = tuple[float, ...]


class SortedRanks:
    """Runs of sorted ranks, one after the other, none empty.

    Each operation is two binary searches, and a pass over one run, or the lengths of the runs, at the speed of C:
    some hundred short steps for 100,000 ranks.
    """

    def __init__(self, max_in_run: int = 1024) -> None:
        """`max_in_run` is at least 2."""
        self._max_in_run = max_in_run
        self._runs: list[list[Rank]] = []
        self._lasts: list[Rank] = []  # of each run

    def add(self, rank: Rank) -> None:
        if not self._runs:
            self._runs.append([rank])
            self._lasts.append(rank)
            return
        index = min(bisect_left(self._lasts, rank), len(self._runs) - 1)
        run = self._runs[index]
        insort(run, rank)
        if len(run) > self._max_in_run:
            self._split(index)
        else:
            self._lasts[index] = run[-1]

    def remove(self, rank: Rank) -> None:
        """Remove one rank that is there."""
        index = bisect_left(self._lasts, rank)
        run = self._runs[index]
        place = bisect_left(run, rank)
        assert run[place] == rank, f"rank {rank} is not there"
        del run[place]
        if run:
            self._lasts[index] = run[-1]
            self._merge(index)
        else:
            del self._runs[index], self._lasts[index]

    def num_below(self, rank: Rank) -> int:
        index = bisect_left(self._lasts, rank)
        num_before = sum(map(len, self._runs[:index]))
        return num_before + (bisect_left(self._runs[index], rank) if index < len(self._runs) else 0)

    def check(self) -> None:
        """Assert that all is sorted, and no run too long."""
        ranks = [rank for run in self._runs for rank in run]
        assert ranks == sorted(ranks)
        assert self._lasts == [run[-1] for run in self._runs]
        assert all(len(run) <= self._max_in_run for run in self._runs)

    def _merge(self, index: int) -> None:
        """Join with the next run where both are short, so that runs which were emptied do not pile up."""
        if index + 1 < len(self._runs) and len(self._runs[index]) + len(self._runs[index + 1]) <= self._max_in_run // 2:
            self._runs[index] += self._runs.pop(index + 1)
            del self._lasts[index]

    def _split(self, index: int) -> None:
        """Split in the middle; the last run at its end, so that ranks which only grow leave full runs behind."""
        run = self._runs[index]
        cut = self._max_in_run if index == len(self._runs) - 1 else len(run) // 2
        self._runs[index : index + 1] = [run[:cut], run[cut:]]
        self._lasts[index : index + 1] = [run[cut - 1], run[-1]]
