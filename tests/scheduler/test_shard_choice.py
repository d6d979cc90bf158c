"""Choices among shards, by any numbers: new workers, workers that move, schedulers that stand by."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from quire.v1 import cluster_pb2 as pb
from scheduler_svc.leadership.shard_choice import (
    Roles,
    ShardView,
    next_roles,
    shard_in_need,
    shard_of_new_worker,
    starving_shard,
)

COUNTS = st.lists(st.tuples(st.booleans(), st.integers(0, 12)), min_size=1, max_size=8)


def shards_of(counts: list[tuple[bool, int]]) -> list[pb.Shard]:
    return [
        pb.Shard(number=number, leader="10.0.0.1:7847" if is_led else "", num_workers=num_workers)
        for number, (is_led, num_workers) in enumerate(counts)
    ]


@given(COUNTS, st.text(max_size=4))
def test_a_new_worker_goes_to_a_led_shard_with_fewest(counts: list[tuple[bool, int]], worker_id: str) -> None:
    chosen = shard_of_new_worker(shards_of(counts), worker_id)
    led = [num for is_led, num in counts if is_led]
    if led:
        assert counts[chosen] == (True, min(led))
    else:
        assert chosen == 0


def test_workers_that_start_at_once_spread_over_many_shards() -> None:
    """1,000 workers come while the loads are published twice: by the lowest number alone 500 would go to one shard."""
    counts = [0] * 100
    for half in range(2):
        shards = shards_of([(True, count) for count in counts])
        for number in range(500):
            counts[shard_of_new_worker(shards, f"worker-{half}-{number}")] += 1
    assert sum(counts) == 1000 and min(counts) >= 2 and max(counts) <= 20


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
        ends = [number for move in moves for number in move]
        assert len(set(ends)) == len(ends), "a shard gives or gets two at once, or gives and gets"
        for giver, taker in moves:
            assert shards[giver].num_workers - shards[taker].num_workers >= 2 and shards[taker].leader
            shards[giver].num_workers -= 1
            shards[taker].num_workers += 1
    else:
        raise AssertionError("workers move for ever")
    led = [shard.num_workers for shard in shards if shard.leader]
    assert not led or max(led) - min(led) <= 1
    assert sum(shard.num_workers for shard in shards) == total


def test_many_shards_are_even_after_a_few_rounds_of_moves() -> None:
    """Half of 100 shards have 20 workers, the others none: ten rounds, since each shard gives one in each."""
    shards = shards_of([(True, 20 * (number % 2)) for number in range(100)])
    for _ in range(10):
        moves = [(giver, taker) for giver in range(100) if (taker := shard_in_need(shards, giver)) is not None]
        for giver, taker in moves:
            shards[giver].num_workers -= 1
            shards[taker].num_workers += 1
    assert {shard.num_workers for shard in shards} == {10}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=6))
def test_a_shard_whose_requests_wait_borrows_a_worker_where_nobody_has_two(
    counts: list[tuple[bool, int, int]],
) -> None:
    shards = shards_of([(is_led, num_workers) for is_led, num_workers, _ in counts])
    for shard, (_, _, num_waiting) in zip(shards, counts, strict=True):
        shard.num_waiting = num_waiting
    loans = {shard.number: starving_shard(shards, shard.number) for shard in shards}
    lent = {giver: taker for giver, taker in loans.items() if taker is not None}
    led = [shard for shard in shards if shard.leader]
    is_short = any(not shard.num_workers and shard.num_waiting for shard in led)
    can_lend = any(shard.num_workers for shard in led) and all(shard.num_workers < 2 for shard in led)
    assert len(lent) == (is_short and can_lend)
    for giver, taker in lent.items():
        assert shards[giver].num_workers == 1 and not shards[taker].num_workers and shards[taker].num_waiting


@given(st.integers(1, 3), st.lists(st.integers(1, 9), min_size=4, max_size=9), st.randoms(use_true_random=False))
def test_a_shard_whose_requests_wait_gets_a_worker_after_at_most_all_the_others(
    num_workers: int, num_waiting: list[int], random: Random
) -> None:
    """Requests wait everywhere again as soon as a worker has left; whichever shard lends, and however many wait."""
    shards = shards_of([(True, int(number < num_workers)) for number in range(len(num_waiting))])
    unserved = set(range(num_workers, len(shards)))
    for _ in range(num_workers * len(shards)):
        for shard, number in zip(shards, num_waiting, strict=True):
            shard.num_waiting, shard.num_running = (number, 0) if not shard.num_workers else (0, random.randint(0, 9))
        loans = {shard.number: starving_shard(shards, shard.number) for shard in shards}
        ((giver, taker),) = ((giver, taker) for giver, taker in loans.items() if taker is not None)
        shards[giver].num_workers, shards[taker].num_workers = 0, 1
        unserved.discard(taker)
    assert not unserved


def test_a_shard_that_a_worker_is_on_its_way_to_gets_no_second_one() -> None:
    """Shard 0 has given its worker to shard 2, which does not show there yet; shard 1 is the next to lend."""
    shards = shards_of([(True, 0), (True, 1), (True, 0), (True, 0)])
    shards[2].num_waiting = shards[3].num_waiting = 1
    assert starving_shard(shards, 1) == 2
    shards[0].gives_to.append(2)
    assert starving_shard(shards, 1) == 3
    assert starving_shard(shards, 1, helped=[3]) is None
    shards[0].leader = ""  # the leader that knew of it is gone
    assert starving_shard(shards, 1) == 2


class Cluster:
    """Schedulers as they see each other, at once, and what their choices make of the shards."""

    def __init__(self, num_shards: int) -> None:
        self.leaders = [""] * num_shards
        self.standing: dict[str, set[int]] = {}

    def views(self) -> list[ShardView]:
        return [
            ShardView(
                number=number,
                leader=leader,
                standbys=tuple(name for name, shards in self.standing.items() if number in shards),
                is_in_need=not leader,
            )
            for number, leader in enumerate(self.leaders)
        ]

    def leading(self, name: str) -> set[int]:
        return {number for number, leader in enumerate(self.leaders) if leader == name}

    def turn(self, name: str) -> bool:
        """One scheduler looks and acts. Returns whether it changed anything."""
        mine = self.standing[name]
        roles = next_roles(self.views(), name, mine, self.leading(name))
        assert not set(roles.begin) & (mine | self.leading(name)) and set(roles.leave) <= mine
        assert set(roles.hand_over) <= self.leading(name)
        mine.difference_update(roles.leave)
        mine.update(roles.begin)
        for number in roles.hand_over:
            successor = next(each for each, shards in self.standing.items() if number in shards and each != name)
            self.leaders[number] = successor
            self.standing[successor].discard(number)
        return bool(roles.begin or roles.leave or roles.hand_over)

    def lead_free(self) -> None:
        """A standby of each free shard takes it."""
        for number, leader in enumerate(self.leaders):
            names = [name for name, shards in self.standing.items() if number in shards]
            if not leader and names:
                self.leaders[number] = names[0]
                self.standing[names[0]].discard(number)

    def settle(self) -> None:
        for _ in range(20 * (len(self.leaders) + len(self.standing))):
            changes = [self.turn(name) for name in self.standing]
            self.lead_free()
            if not any(changes):
                return
        raise AssertionError("roles change for ever")


@given(st.integers(1, 8), st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=12))
def test_however_schedulers_come_and_go_each_shard_is_led_and_none_leads_two_more_than_another(
    num_shards: int, changes: list[tuple[bool, int]]
) -> None:
    cluster = Cluster(num_shards)
    for comes, which in [(True, 0), *changes]:
        name = f"10.0.0.{which}:7847"
        if comes:
            cluster.standing.setdefault(name, set())
        elif name in cluster.standing and len(cluster.standing) > 1:
            del cluster.standing[name]
            cluster.leaders = ["" if leader == name else leader for leader in cluster.leaders]
        cluster.settle()
        assert all(cluster.leaders)
        counts = [len(cluster.leading(each)) for each in cluster.standing]
        assert max(counts) - min(counts) <= 1
        idle = [each for each in cluster.standing if not cluster.leading(each)]
        assert all(len(cluster.standing[each]) == 1 for each in idle)  # it stands by for one


def test_the_shards_of_schedulers_that_die_together_go_to_many() -> None:
    """Ten of fifty are gone at once: nobody takes more than one, whoever looks first."""
    cluster = Cluster(50)
    cluster.leaders = [f"10.0.0.{number}:7847" for number in range(50)]
    cluster.standing = {name: set() for name in cluster.leaders[10:]}
    cluster.leaders[:10] = [""] * 10
    for name in cluster.standing:
        cluster.turn(name)
    assert all(len(shards) <= 1 for shards in cluster.standing.values())
    cluster.lead_free()
    assert all(cluster.leaders) and max(len(cluster.leading(name)) for name in cluster.standing) == 2


def test_a_leader_of_all_hands_one_over_to_each_that_stands_by() -> None:
    views = [ShardView(number=number, leader="me", standbys=(f"s{number}",), is_in_need=False) for number in range(4)]
    assert next_roles(views, "me", (), range(4)).hand_over == [0, 1, 2]


def test_one_with_more_shards_comes_too_if_the_only_other_one_is_about_to_leave() -> None:
    views = [ShardView(number=number, leader="a", standbys=(), is_in_need=False) for number in range(2)]
    views.append(ShardView(number=2, leader="b", standbys=(), is_in_need=True))
    assert next_roles(views, "a", (), (0, 1)) == Roles(begin=[2], leave=[], hand_over=[])


def test_schedulers_that_begin_together_choose_different_shards() -> None:
    views = [ShardView(number=number, leader="", standbys=(), is_in_need=False) for number in range(3)]
    chosen = {next_roles(views, f"10.0.0.{which}:7847", (), ()).begin[0] for which in range(20)}
    assert chosen == {0, 1, 2}


REMOVED = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=7)


@given(REMOVED, st.integers(1, 7), st.text(max_size=4))
def test_removed_shards_give_all_their_workers_away_once_they_have_no_requests(
    counts: list[tuple[int, int, int]], num_wanted: int, worker_id: str
) -> None:
    """By any numbers of workers, and of requests that run and wait."""
    shards = shards_of([(True, num_workers) for num_workers, _, _ in counts])
    for shard, (_, num_running, num_waiting) in zip(shards, counts, strict=True):
        shard.num_running, shard.num_waiting = num_running, num_waiting
    done = {each.number for each in shards[num_wanted:] if not each.num_running + each.num_waiting}
    total = sum(shard.num_workers for shard in shards)
    assert shard_of_new_worker(shards, worker_id, num_wanted) < num_wanted
    for _ in range(2 * total + 1):
        moves = [
            (giver, taker)
            for giver in range(len(shards))
            if (taker := shard_in_need(shards, giver, num_wanted)) is not None
        ]
        if not moves:
            break
        assert not {taker for _, taker in moves} & (done | {giver for giver, _ in moves})
        for giver, taker in moves:
            shards[giver].num_workers -= 1
            shards[taker].num_workers += 1
    else:
        raise AssertionError("workers move for ever")
    rest = [shard.num_workers for shard in shards if shard.number not in done]
    assert not any(shards[number].num_workers for number in done) and sum(rest) == total
    assert max(rest) - min(rest) <= 1
