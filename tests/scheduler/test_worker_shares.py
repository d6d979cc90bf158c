"""Leaders of several shards that lend one worker to each other, on a clock of their own."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.v1 import cluster_pb2 as pb
from scheduler_svc.api.worker_shares import WorkerShares

SLICE_S = 3.0  # that a shard keeps what it was lent
REGISTER_S = 0.5  # between two registrations of a worker
PUBLISH_S = 0.25


@dataclass
class Member:
    """A worker as its leader knows it."""

    worker_id: str
    incarnation: str
    is_leaving: bool = False
    is_driven: bool = True


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
            for shard, members in zip(self.watch.shards, self.members, strict=True):
                shard.num_workers = len(members)


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
    assert lending.leaders[0].shard_of(request) == 2
