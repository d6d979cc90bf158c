"""Summary of the failover benchmark's moments."""

import asyncio

import pytest

from benchmarks.durability.failover_time import KILL, Arrivals, Round, longest_silence, row_of, section_of


def test_silence_counts_from_when_the_leader_is_taken_away() -> None:
    assert longest_silence([[1.0, 9.0, 9.5, 12.0, 12.1]], since_s=9.2) == 2.5
    assert longest_silence([[1.0, 9.0, 14.0]], since_s=10.0) == 4.0


def test_a_stream_is_silent_though_others_get_tokens() -> None:
    busy = [number / 10 for number in range(100)]
    assert longest_silence([busy, [0.1, 2.0, 7.0, 7.1]], since_s=1.0) == 5.0
    assert longest_silence([busy, [0.1, 6.5]], since_s=1.0) == 5.5


def test_a_stream_that_got_no_token_afterwards_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token"):
        longest_silence([[1.0, 3.0], [1.0]], since_s=2.0)


async def test_tokens_of_one_stream_do_not_stand_for_those_of_another() -> None:
    arrivals = Arrivals(2)
    arrivals.add(0, 0.5)
    waiting = asyncio.create_task(arrivals.until_each(2))
    for _ in range(9):
        arrivals.add(0, 1.0)
        await asyncio.sleep(0)
    assert not waiting.done()
    for _ in range(2):
        arrivals.add(1, 2.0)
    await waiting
    assert arrivals.times_s == [[0.5, *[1.0] * 9], [2.0, 2.0]]


def test_a_row_has_the_median_and_the_worst_of_all_rounds() -> None:
    row = row_of(KILL, 2000, [Round(1.4, 1.25), Round(3.0, 1.0), Round(1.2, 1.5)])
    assert (row.silence_s, row.worst_silence_s) == (1.4, 3.0)
    assert (row.no_leader_s, row.worst_no_leader_s) == (1.25, 1.5)
    assert len(row.rounds) == 3


@pytest.mark.parametrize(("fields", "words"), [({}, "any of the streams"), ({"silence_of": "each stream"}, "a stream")])
def test_the_page_says_whether_a_silence_is_of_one_stream_or_of_all(fields: dict[str, str], words: str) -> None:
    about = {"rows": [], "silence_budget_s": 2.25, "hand_over_budget_s": 0.1, "lease_ms": 1500, "store": "a store"}
    assert f"without a token of {words}" in section_of({**about, **fields}).done
