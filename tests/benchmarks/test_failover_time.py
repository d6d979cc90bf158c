"""Summary of the failover benchmark's moments."""

import pytest

from benchmarks.durability.failover_time import KILL, Round, longest_silence, row_of


def test_silence_counts_from_when_the_leader_is_taken_away() -> None:
    assert longest_silence([1.0, 9.0, 9.5, 12.0, 12.1], since_s=9.2) == 2.5
    assert longest_silence([1.0, 9.0, 14.0], since_s=10.0) == 4.0


def test_a_row_has_the_median_and_the_worst_of_all_rounds() -> None:
    row = row_of(KILL, 2000, [Round(1.4, 1.25), Round(3.0, 1.0), Round(1.2, 1.5)])
    assert (row.silence_s, row.worst_silence_s) == (1.4, 3.0)
    assert (row.no_leader_s, row.worst_no_leader_s) == (1.25, 1.5)
    assert len(row.rounds) == 3


def test_where_no_token_came_there_is_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="empty"):
        longest_silence([1.0], since_s=2.0)
