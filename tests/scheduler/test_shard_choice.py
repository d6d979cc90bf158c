"""Choices among shards, by any numbers: new workers, workers that move, schedulers that stand by."""

from hypothesis import given
from hypothesis import strategies as st

from quire.v1 import cluster_pb2 as pb
from scheduler_svc.leadership.shard_choice import shard_in_need, shard_of_new_worker, shard_to_stand_by

COUNTS = st.lists(st.tuples(st.booleans(), st.integers(0, 12)), min_size=1, max_size=8)


def shards_of(counts: list[tuple[bool, int]]) -> list[pb.Shard]:
    return [
        pb.Shard(number=number, leader="10.0.0.1:7847" if is_led else "", num_workers=num_workers)
        for number, (is_led, num_workers) in enumerate(counts)
    ]


@given(COUNTS)
def test_a_new_worker_goes_to_a_led_shard_with_fewest(counts: list[tuple[bool, int]]) -> None:
    chosen = shard_of_new_worker(shards_of(counts))
    led = [num for is_led, num in counts if is_led]
    if led:
        assert counts[chosen] == (True, min(led)) and counts.index(counts[chosen]) == chosen
    else:
        assert chosen == 0


@given(COUNTS)
def test_moves_end_in_an_even_spread_and_take_workers_from_no_shard_without_need(
    counts: list[tuple[bool, int]],
) -> None:
    """Each move is one that some leader decides by itself; however the numbers are, it stops, and soon."""
    shards = shards_of(counts)
    total = sum(shard.num_workers for shard in shards)
    for _ in range(total + 1):
        moves = [(giver, taker) for giver in range(len(shards)) if (taker := shard_in_need(shards, giver)) is not None]
        if not moves:
            break
        ((giver, taker),) = moves  # one shard alone gives
        assert shards[giver].num_workers - shards[taker].num_workers >= 2 and shards[taker].leader
        shards[giver].num_workers -= 1
        shards[taker].num_workers += 1
    else:
        raise AssertionError("workers move for ever")
    led = [shard.num_workers for shard in shards if shard.leader]
    assert not led or max(led) - min(led) <= 1
    assert sum(shard.num_workers for shard in shards) == total


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 4)), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 1000),
)
def test_a_scheduler_stands_by_where_it_is_needed_most(known: list[tuple[int | None, bool]], turn: int) -> None:
    chosen = shard_to_stand_by([number for number, _ in known], [needs for _, needs in known], turn)
    number, needs = known[chosen]
    if any(needs for _, needs in known):
        assert needs
    rivals = [other or 0 for other, its in known if its == needs]
    assert (number or 0) == min(rivals)


def test_schedulers_that_begin_together_choose_different_shards() -> None:
    assert {shard_to_stand_by([0, 0, 0], [True, True, True], turn) for turn in range(3)} == {0, 1, 2}
