"""A worker of a deployment with several shards: it serves the one that it is told, and moves when it is told to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from common.rpc import Context
from quire.errors import NotLeaderError
from quire.v1 import cluster_pb2 as pb
from tests.patience import patient
from tests.scheduler.journal_setup import until
from tests.services import free_address
from tests.worker.test_registration import IDENTITY, Scheduler, ScriptedNames, answered
from worker_svc.service import registration as registration_module
from worker_svc.service.registration import Registration, WorkerIdentity


class ShardLeader(Scheduler):
    """Leads one shard, and tells every worker `wanted`: the shard that it shall serve."""

    def __init__(self, shard: int, wanted: int, epoch: int) -> None:
        super().__init__(epoch)
        self.shard, self.wanted = shard, wanted
        self.registered: list[pb.RegisterRequest] = []
        self.num_told = 0  # workers, again and again, which shard they shall serve

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        if not request.HasField("shard"):
            self.num_told += 1
            return pb.RegisterResponse(lease_ms=self.lease_ms, shard=self.wanted)
        assert ("quire-shard", str(request.shard)) in (context.invocation_metadata() or ())
        if request.shard != self.shard:
            raise NotLeaderError(f"this scheduler does not lead shard {request.shard}")
        self.registered.append(request)
        answer = await super().Register(request, context)
        answer.shard = self.wanted
        return answer


class Lives:
    """Incarnations that a worker begins, and epochs that it is told to follow."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.epochs: list[int] = []

    def begin(self) -> WorkerIdentity:
        self.num_begun += 1
        return replace(IDENTITY, incarnation=f"life-{self.num_begun}", step_key=f"key-{self.num_begun}")


async def told_anew(leader: ShardLeader) -> None:
    """Return when a worker that has no shard any more was told one by this leader."""
    num_before = leader.num_told
    await until(lambda: leader.num_told > num_before)


@asynccontextmanager
async def registered(*leaders: ShardLeader) -> AsyncIterator[Lives]:
    addresses = [free_address() for _ in leaders]
    for leader, address in zip(leaders, addresses, strict=True):
        await leader.start(address)
    lives = Lives()
    registration = Registration(",".join(addresses), IDENTITY, lives.epochs.append, begin_life=lives.begin)
    keeping = asyncio.create_task(registration.keep_lease())
    try:
        yield lives
    finally:
        keeping.cancel()
        await registration.close()
        await asyncio.gather(*(leader.server.stop(0) for leader in leaders))


async def test_a_new_worker_registers_with_the_shard_that_it_is_told_alone() -> None:
    first, second = ShardLeader(0, 1, epoch=7), ShardLeader(1, 1, epoch=3)
    async with registered(first, second) as lives:
        await answered(second)
        assert second.registered[0].shard == 1 and second.registered[0].incarnation == IDENTITY.incarnation
        assert first.registered == [] and lives.epochs == [3] and lives.num_begun == 0


async def test_a_worker_that_shall_move_drains_first_and_comes_as_another_incarnation() -> None:
    """The other leader may have a lower epoch: it is no earlier leader of the same shard."""
    first, second = ShardLeader(0, 0, epoch=7), ShardLeader(1, 0, epoch=3)
    first.num_running = 3
    async with registered(first, second) as lives:
        await answered(first)
        first.wanted = second.wanted = 1
        await answered(second)
        assert [each.worker_id for each in first.drained] == ["w1"] * 3 and first.num_running == 0
        assert any(each.draining for each in first.registered)
        last = second.registered[-1]
        assert (last.incarnation, last.step_key, last.draining) == ("life-1", "key-1", False)
        assert second.registered[0].epoch == 0  # it has forgotten the epoch of the other shard
        assert lives.epochs == [7, 0, 3] and lives.num_begun == 1


class DeposedLeader(ShardLeader):
    """A leader that is none any more once it is asked to drain a worker, and still answers."""

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        if self.drained:
            raise NotLeaderError("it leads no more")
        return await super().Register(request, context)


class FrozenLeader(DeposedLeader):
    """A leader that is frozen once it is asked to drain a worker."""

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        self.drained.append(request)
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("kind", [FrozenLeader, DeposedLeader])
async def test_a_worker_moves_though_the_leader_that_it_drains_at_is_named_no_more(
    monkeypatch: pytest.MonkeyPatch, kind: type[DeposedLeader]
) -> None:
    """The channel is closed under a call, or between two."""
    monkeypatch.setattr(registration_module, "_RESOLVE_S", 0.1)
    first, second = kind(0, 0, epoch=7), ShardLeader(1, 0, epoch=3)
    first.num_running = 10_000
    await first.start(frozen := free_address())
    await second.start(other := free_address())

    names = ScriptedNames(lambda: [other] if first.drained else [frozen, other])
    lives = Lives()
    registration = Registration("scheduler.invalid:1", IDENTITY, names=names, begin_life=lives.begin)
    keeping = asyncio.create_task(registration.keep_lease())
    try:
        async with asyncio.timeout(patient(20)):
            await answered(first)
            first.wanted = second.wanted = 1
            await answered(second)
        assert second.registered[-1].incarnation == "life-1" and not second.registered[-1].draining
    finally:
        keeping.cancel()
        await registration.close()
        await asyncio.gather(first.server.stop(0), second.server.stop(0))


async def test_a_worker_whose_shard_has_no_leader_for_long_asks_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration_module, "_RESOLVE_S", 0.1)
    first, second = ShardLeader(0, 0, epoch=7), ShardLeader(1, 0, epoch=3)
    async with registered(first, second) as lives:
        await answered(first)
        await first.server.stop(0)
        second.wanted = 1
        monkeypatch.setattr(registration_module, "_LEADERLESS_S", 0.2)
        await told_anew(second)
        monkeypatch.setattr(registration_module, "_LEADERLESS_S", patient(60))  # for a slow answer of the other one
        async with asyncio.timeout(patient(20)):
            await answered(second)
        assert second.registered[-1].incarnation == "life-1" and lives.num_begun == 1


async def test_a_new_worker_whose_shard_is_gone_before_it_came_asks_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration_module, "_LEADERLESS_S", 0.2)
    monkeypatch.setattr(registration_module, "_RESOLVE_S", 0.1)
    leader = ShardLeader(0, 2, epoch=7)  # nobody leads shard 2
    async with registered(leader) as lives:
        for _ in range(2):
            await told_anew(leader)
        assert not leader.registered
        leader.wanted = 0
        await told_anew(leader)
        monkeypatch.setattr(registration_module, "_LEADERLESS_S", patient(60))  # for a slow answer
        await answered(leader)
        assert leader.registered[-1].incarnation == IDENTITY.incarnation and lives.num_begun == 0
