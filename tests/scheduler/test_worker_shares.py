"""Leaders of several shards that lend one worker to each other, on a clock of their own."""

from dataclasses import dataclass
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import UnavailableError
from quire.v1 import cluster_pb2 as pb
from scheduler_svc.api.cluster_servicer import ClusterServicer
from scheduler_svc.api.worker_shares import SHORT_LEASE_MS, WorkerShares
from scheduler_svc.workers.workers import LEASE_MS

SLICE_S = 3.0  # that a shard whose requests wait keeps what it was lent
REGISTER_S = 0.5  # between two registrations of a worker
PUBLISH_S = 0.25
FRESH_S = 1.5  # that a shard has no worker before it is lent one


@dataclass
class Member:
    """A worker as its leader knows it."""

    worker_id: str
    incarnation: str
    is_leaving: bool = False
    is_drained: bool = False

    @property
    def is_in_service(self) -> bool:
        return not self.is_leaving and not self.is_drained


class Watch:
    """Shards as their leaders published them last."""

    def __init__(self, num_shards: int) -> None:
        self.shards = [pb.Shard(number=number, leader=f"l{number}:1", num_waiting=1) for number in range(num_shards)]
        self.num_wanted = num_shards
        self.unseen: set[int] = set()

    def leader_of(self, shard: int) -> str | None:
        return self.shards[shard].leader


class Lending:
    """One worker among leaders whose shards always have requests that wait; `stays` has each shard it was in."""

    def __init__(self, num_shards: int, drain_s: float) -> None:
        self.now_s = 0.0
        self.watch = Watch(num_shards)
        self.members: list[dict[str, Member]] = [{} for _ in range(num_shards)]
        self.leaders = [
            WorkerShares(shard, self.watch, self.members[shard], lambda worker_id: 0, lambda: self.now_s)
            for shard in range(num_shards)
        ]
        self.stays: list[tuple[int, float]] = []  # shard, and seconds from the first registration to the order to move
        self._drain_s = drain_s
        self._shard = 0
        self._num_lives = 0

    def live_in_a_shard(self) -> None:
        """Register until told to move; then drain, and go."""
        self._num_lives += 1
        incarnation, came_s = f"i{self._num_lives}", self.now_s
        request = pb.RegisterRequest(worker_id="w", incarnation=incarnation, shard=self._shard)
        while (told := self.leaders[self._shard].shard_of(request)) == self._shard:
            self.members[self._shard]["w"] = Member("w", incarnation)
            self._pass(REGISTER_S)
        self.stays.append((self._shard, self.now_s - came_s))
        self.members[self._shard]["w"].is_leaving = True
        until_s = self.now_s + self._drain_s
        while self.now_s < until_s:
            assert self.leaders[self._shard].shard_of(request) == told, "told otherwise while it drains"
            self._pass(min(REGISTER_S, until_s - self.now_s))
        del self.members[self._shard]["w"]
        self._shard = told

    def _pass(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += min(PUBLISH_S, until_s - self.now_s)
            for shard, members, leader in zip(self.watch.shards, self.members, self.leaders, strict=True):
                shard.num_workers = sum(member.is_in_service for member in members.values())
                shard.gives_to[:] = leader.gives_to()


@settings(max_examples=30)
@given(st.integers(2, 5), st.sampled_from([0.0, 0.05, 1.0, 4.0, 20.0]))
def test_a_worker_that_comes_back_serves_as_long_as_before_and_no_shard_is_passed_by(
    num_shards: int, drain_s: float
) -> None:
    lending = Lending(num_shards, drain_s)
    for _ in range(3 * num_shards):
        lending.live_in_a_shard()
    shards = [shard for shard, _ in lending.stays]
    assert shards == [turn % num_shards for turn in range(3 * num_shards)]
    assert min(stay_s for _, stay_s in lending.stays) >= SLICE_S


def test_a_shard_that_cannot_be_seen_neither_gets_a_worker_nor_keeps_others_from_giving() -> None:
    lending = Lending(3, 0.0)
    lending.watch.shards[0].num_workers = 1
    lending.members[0]["w"] = Member("w", "i1")
    request = pb.RegisterRequest(worker_id="w", incarnation="i1", shard=0)
    lending.leaders[0].shard_of(request)
    lending.now_s += SLICE_S + 1
    lending.watch.unseen = {1, 2}
    assert lending.leaders[0].shard_of(request) == 0
    lending.watch.unseen = {1}
    assert lending.leaders[0].shard_of(request) == 0  # its own workers may still come
    lending.now_s += FRESH_S
    assert lending.leaders[0].shard_of(request) == 2


def test_a_worker_that_is_drained_is_not_given_away() -> None:
    """The shard that it went to would not know that it is drained."""
    lending = Lending(2, 0.0)
    members = lending.members[0]
    members |= {name: Member(name, "i1", is_drained=name == "w0") for name in ("w0", "w1", "w2", "w3")}
    lending.watch.shards[0].num_workers = 3
    told = {
        name: lending.leaders[0].shard_of(pb.RegisterRequest(worker_id=name, incarnation="i1", shard=0))
        for name in members
    }
    assert told == {"w0": 0, "w1": 1, "w2": 0, "w3": 0}


async def test_a_worker_on_its_way_to_another_shard_is_not_drained_in_the_one_that_it_leaves() -> None:
    lending = Lending(2, 0.0)
    lending.watch.shards[0].num_workers = 2
    lending.members[0].update({name: Member(name, "i1") for name in ("w0", "w1")})
    leader = lending.leaders[0]
    assert not leader.is_given_away("w0")
    assert leader.shard_of(pb.RegisterRequest(worker_id="w0", incarnation="i1", shard=0)) == 1
    context, no_workers = cast(Any, None), cast(Any, None)  # neither is asked
    with pytest.raises(UnavailableError, match="another shard"):
        await ClusterServicer(no_workers, leader).DrainWorker(pb.DrainWorkerRequest(worker_id="w0"), context)
    assert not leader.is_given_away("w1")
    del lending.members[0]["w0"]
    assert not leader.is_given_away("w0")


def test_a_shard_whose_leader_is_new_gets_no_worker_of_another_while_its_own_may_come() -> None:
    """Whoever lends one at once leaves its own shard without any, as soon as the other one's has come."""
    lending = Lending(2, 0.0)
    mine, other = lending.watch.shards
    mine.num_workers, mine.epoch, other.epoch = 1, 5, 6
    lending.members[0]["w"] = Member("w", "i1")
    request = pb.RegisterRequest(worker_id="w", incarnation="i1", shard=0)
    for _ in range(4):
        for _ in range(3):  # of its first 1.5 s under this leader
            assert lending.leaders[0].shard_of(request) == 0
            lending.now_s += REGISTER_S
        other.epoch += 1
    for _ in range(3):
        assert lending.leaders[0].shard_of(request) == 0
        lending.now_s += REGISTER_S
    assert lending.leaders[0].shard_of(request) == 1


class Turns:
    """One worker among shards whose clients send a request when the last one has ended: what they wait, and how much of
    the time the worker serves.

    Requests run side by side, as many as there are seats, each as long as alone; a worker that is told to move starts
    none, and goes when those that run have ended.
    """

    MOVE_S = 0.5  # from the end of a drain to the first step in another shard
    STEP_S = 0.05

    def __init__(self, clients: list[int], length_s: float, *, num_seats: int = 100, pause_s: float = 0.0) -> None:
        """`clients`: of each shard. `pause_s`: between two requests of a client."""
        self.now_s = self.served_s = 0.0
        self.waits_s: list[float] = []
        self.num_moves = 0
        self._length_s, self._num_seats, self._pause_s = length_s, num_seats, pause_s
        self._watch = Watch(len(clients))
        self._members: list[dict[str, Member]] = [{} for _ in clients]
        self._running: list[list[float]] = [[] for _ in clients]  # ends
        self._waiting: list[list[float]] = [[0.0] * number for number in clients]  # since when
        self._coming: list[list[float]] = [[] for _ in clients]
        self._leaders = [
            WorkerShares(shard, self._watch, self._members[shard], lambda worker_id: 0, lambda: self.now_s)
            for shard in range(len(clients))
        ]
        self._shard = 0
        self._target = 0  # where it is told to go
        self._back_s = 0.0  # when it serves again, after a move
        self._register_s = 0.0

    def run(self, seconds: float) -> None:
        while self.now_s < seconds:
            self.now_s += self.STEP_S
            for shard, running in enumerate(self._running):
                ended = [end_s for end_s in running if end_s <= self.now_s]
                running[:] = [end_s for end_s in running if end_s > self.now_s]
                self._coming[shard] += [end_s + self._pause_s for end_s in ended]
                self._waiting[shard] += [come_s for come_s in self._coming[shard] if come_s <= self.now_s]
                self._coming[shard] = [come_s for come_s in self._coming[shard] if come_s > self.now_s]
            self._work()
            if round(self.now_s / self.STEP_S) % round(PUBLISH_S / self.STEP_S) == 0:
                self._publish()

    def _work(self) -> None:
        if self.now_s < self._back_s:
            return
        shard, running, waiting = self._shard, self._running[self._shard], self._waiting[self._shard]
        members = self._members[shard]
        member = members.setdefault("w", Member("w", f"i{self.num_moves}"))
        if self._target == shard:
            while waiting and len(running) < self._num_seats:
                self.waits_s.append(self.now_s - waiting.pop(0))
                running.append(self.now_s + self._length_s)
            if self.now_s >= self._register_s:
                request = pb.RegisterRequest(worker_id="w", incarnation=member.incarnation, shard=shard)
                self._target = self._leaders[shard].shard_of(request)
                member.is_leaving = self._target != shard
                lease_ms = SHORT_LEASE_MS if self._leaders[shard].are_scarce else LEASE_MS
                self._register_s = self.now_s + lease_ms / 3000
        self.served_s += self.STEP_S if running else 0.0
        if self._target != shard and not running:
            members.clear()
            self.num_moves += 1
            self._shard, self._back_s, self._register_s = self._target, self.now_s + self.MOVE_S, 0.0

    def _publish(self) -> None:
        for shard, each in enumerate(self._watch.shards):
            each.num_workers = sum(member.is_in_service for member in self._members[shard].values())
            each.num_waiting, each.num_running = len(self._waiting[shard]), len(self._running[shard])
            each.gives_to[:] = self._leaders[shard].gives_to()


def test_a_first_token_waits_for_little_more_than_the_requests_of_the_other_shards() -> None:
    """Three shards whose requests take 3 s and all run at once: two turns, in which a request may start 1 s and a
    registration after the first; beside that what moves and publishing take."""
    turns = Turns([4, 4, 4], 3.0)
    turns.run(200)
    assert max(turns.waits_s) <= 2 * (3.0 + 1.0 + 0.5 + PUBLISH_S + turns.MOVE_S) + turns.MOVE_S + 0.5
    assert turns.served_s > 0.8 * 200


def test_a_worker_does_not_go_round_for_nothing_where_more_waits_than_it_can_serve() -> None:
    turns = Turns([12, 12, 12], 0.4, num_seats=4)
    turns.run(200)
    assert turns.served_s > 0.8 * 200
    assert turns.num_moves <= 200 / SLICE_S


def test_a_shard_without_requests_gives_its_worker_at_once() -> None:
    """Requests of 0.2 s, now here, now there: each waits for a look and a move."""
    turns = Turns([1, 1, 1], 0.2, pause_s=7.1)
    turns.run(200)
    assert max(turns.waits_s) <= 2 * (0.2 + 0.5 + PUBLISH_S + turns.MOVE_S) + 1.0 + turns.MOVE_S
    assert sorted(turns.waits_s)[len(turns.waits_s) // 2] < 1.5


class Loans:
    """Workers that serve shards without requests, one each, and shards behind them whose requests wait.

    Every leader publishes, looks and is registered with at times of its own, and so sees the others late.
    """

    LOOK, PUBLISH, REGISTER = 10, 25, 50  # hundredths of a second, as all times here

    def __init__(self, num_workers: int, starving: list[int], move_s: float, random: Random) -> None:
        """`starving`: shards whose requests wait; they are served for good once a worker has come."""
        num_shards = max([num_workers - 1, *starving]) + 1
        self.now = 0
        self.sent: list[int] = []  # shards that workers were sent to
        self.num_lost = 0  # workers sent from now on that die on the way
        self.starving = set(starving)
        self.members: list[dict[str, Member]] = [{} for _ in range(num_shards)]
        self._move, self._random = round(move_s * 100), random
        self._watches = [Watch(num_shards) for _ in range(num_shards)]
        self.leaders = [
            WorkerShares(shard, watch, members, lambda worker_id: 0, lambda: self.now / 100)
            for shard, (watch, members) in enumerate(zip(self._watches, self.members, strict=True))
        ]
        self._published = [pb.Shard() for _ in range(num_shards)]
        self._phases = [[random.randrange(each) for each in (self.LOOK, self.PUBLISH)] for _ in range(num_shards)]
        self._comes: list[tuple[int, int, str]] = []  # when, shard and worker
        self._registers: dict[str, int] = {}
        self.num_running = [0] * num_shards
        for shard in range(num_workers):
            self._join(shard, f"w{shard}")
        for shard in range(num_shards):
            self._publish(shard)
            self._watches[shard].shards = self._published  # until the first look

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 100)):
            self.now += 1
            for shard, (look, publish) in enumerate(self._phases):
                if self.now % self.PUBLISH == publish:
                    self._publish(shard)
                if self.now % self.LOOK == look:
                    self._watches[shard].shards = list(self._published)
            for come in [each for each in self._comes if each[0] <= self.now]:
                self._comes.remove(come)
                self._join(come[1], come[2])
            self._register()

    def _join(self, shard: int, worker_id: str) -> None:
        self.members[shard][worker_id] = Member(worker_id, f"i{self.now}")
        self._registers[worker_id] = self.now + self._random.randrange(self.REGISTER)

    def _register(self) -> None:
        for shard, members in enumerate(self.members):
            for member in [each for each in members.values() if self._registers[each.worker_id] <= self.now]:
                self._registers[member.worker_id] += self.REGISTER
                request = pb.RegisterRequest(worker_id=member.worker_id, incarnation=member.incarnation, shard=shard)
                if (told := self.leaders[shard].shard_of(request)) != shard:
                    self._send(shard, told, member.worker_id)

    def _send(self, shard: int, target: int, worker_id: str) -> None:
        del self.members[shard][worker_id]
        self.sent.append(target)
        if self.num_lost:
            self.num_lost -= 1
        else:
            self._comes.append((self.now + self._move, target, worker_id))

    def _publish(self, shard: int) -> None:
        num_workers = len(self.members[shard])
        waits = shard in self.starving
        self._published[shard] = pb.Shard(
            number=shard,
            leader=f"l{shard}:1",
            num_workers=num_workers,
            num_waiting=int(waits and not num_workers),
            num_running=1 if waits and num_workers else self.num_running[shard],
            gives_to=self.leaders[shard].gives_to(),
        )


@pytest.mark.parametrize("move_s", [0.5, 2.0])
@pytest.mark.parametrize("starving", [[6], [7], [6, 7], [6, 7, 8, 9]])
def test_one_worker_is_sent_to_each_shard_that_has_none(starving: list[int], move_s: float) -> None:
    for seed in range(20):
        loans = Loans(6, starving, move_s, Random(seed))
        loans.run(12)
        assert sorted(loans.sent) == starving, f"seed {seed}"


@pytest.mark.parametrize("move_s", [0.5, 2.0])
def test_a_shard_is_sent_another_worker_seconds_after_one_has_died_on_its_way(move_s: float) -> None:
    for seed in range(10):
        loans = Loans(6, [7], move_s, Random(seed))
        loans.num_lost = 1
        loans.run(5.5 + FRESH_S + move_s)
        assert loans.sent == [7, 7] and loans.members[7], f"seed {seed}"


def test_a_worker_of_a_shard_that_was_just_forgotten_stays() -> None:
    watch, member = Watch(2), Member("w", "i1")
    shares = WorkerShares(1, watch, {"w": member}, lambda worker_id: 0)
    watch.shards = watch.shards[:1]
    assert shares.shard_of(pb.RegisterRequest(worker_id="w", incarnation="i1", shard=1)) == 1


def test_workers_register_more_often_while_a_shard_that_may_need_one_has_none() -> None:
    watch = Watch(3)
    shares = WorkerShares(0, watch, {}, lambda worker_id: 0)
    for shard in watch.shards:
        shard.num_workers, shard.num_waiting = 1, 0
    assert not shares.are_scarce
    watch.shards[2].num_workers = 0
    assert shares.are_scarce
    watch.num_wanted = 2  # it was removed
    assert not shares.are_scarce
    watch.shards[2].num_waiting = 1  # and a paused request is resumed there
    assert shares.are_scarce
    watch.unseen = {2}
    assert not shares.are_scarce
