"""A worker announces itself to whatever scheduler is there, was not there, or comes back."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
import structlog

from common.rpc import CLUSTER_MESSAGE_BYTES, Context
from common.serving import GrpcServer
from quire.errors import FailedPreconditionError, NotLeaderError
from quire.host_names import HostNames
from quire.v1 import cluster_pb2 as pb
from quire.v1 import cluster_pb2_grpc
from tests.patience import patient
from tests.scheduler.journal_setup import until
from tests.services import free_address
from tests.unreadable_answers import Unreadable
from worker_svc.service import registration as registration_module
from worker_svc.service.followed_epoch import FollowedEpoch
from worker_svc.service.registration import Registration, WorkerIdentity

IDENTITY = WorkerIdentity(worker_id="w1", incarnation="i1", address="10.0.0.1:7000", model_fingerprint="f1")


class DamagedCode:
    """Code of a status that gRPC does not know, as a flipped bit makes one."""

    value = (34, "unknown")


class Scheduler(cluster_pb2_grpc.ClusterServicer):
    """Counts signs of life; leases are short."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.lease_ms = 60
        self.requests: asyncio.Queue[pb.RegisterRequest] = asyncio.Queue()
        self.refusals = 0
        self.out_of_service = ""
        self.num_damaged = 0  # statuses to come that gRPC does not know
        self.num_running = 0  # there, as DrainWorker says; one less each time
        self.drained: list[pb.DrainWorkerRequest] = []
        self.num_unreadable: Counter[str] = Counter()  # answers to come, by method
        self.server = GrpcServer(["quire.v1.Cluster"], CLUSTER_MESSAGE_BYTES)
        self.server.grpc.add_generic_rpc_handlers((Unreadable(self.num_unreadable),))
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, self.server.grpc)

    async def start(self, address: str) -> None:
        self.server.bind(address)
        await self.server.start()

    async def Topology(self, request: pb.TopologyRequest, context: Context) -> AsyncIterator[pb.TopologyResponse]:
        yield pb.TopologyResponse()

    async def SetShards(self, request: pb.SetShardsRequest, context: Context) -> pb.SetShardsResponse:
        raise FailedPreconditionError("it has one shard")

    async def Register(
        self,
        request: pb.RegisterRequest,
        context: grpc.aio.ServicerContext[pb.RegisterRequest, pb.RegisterResponse],
    ) -> pb.RegisterResponse:
        self.requests.put_nowait(request)
        if self.num_damaged:
            self.num_damaged -= 1
            await context.abort(DamagedCode(), "damaged on its way")  # type: ignore[arg-type]
        if self.refusals:
            self.refusals -= 1
            raise FailedPreconditionError("another live worker has this worker_id")
        return pb.RegisterResponse(lease_ms=self.lease_ms, epoch=self.epoch, out_of_service=self.out_of_service)

    async def DrainWorker(
        self,
        request: pb.DrainWorkerRequest,
        context: grpc.aio.ServicerContext[pb.DrainWorkerRequest, pb.DrainWorkerResponse],
    ) -> pb.DrainWorkerResponse:
        self.drained.append(request)
        if not self.num_running:
            return pb.DrainWorkerResponse()
        self.num_running -= 1
        return pb.DrainWorkerResponse(num_running=self.num_running)


async def answered(scheduler: Scheduler) -> None:
    """Return when the worker has an answer of this scheduler: it asks again only then."""
    for _ in range(2):
        await scheduler.requests.get()


@pytest.fixture
async def registration() -> AsyncIterator[tuple[str, Registration]]:
    address = free_address()
    registration = Registration(address, IDENTITY)
    keeping = asyncio.create_task(registration.keep_lease())
    yield address, registration
    keeping.cancel()
    await registration.close()


async def test_a_worker_that_was_first_is_found_and_found_again(registration: tuple[str, Registration]) -> None:
    """The scheduler starts after the worker, goes away and comes back with a higher epoch."""
    address, _ = registration
    with structlog.testing.capture_logs() as logs:
        for epoch in (1, 2):
            scheduler = Scheduler(epoch)
            await scheduler.start(address)
            signs = [await scheduler.requests.get() for _ in range(4)]
            await scheduler.server.stop(0)
            assert [sign.epoch for sign in signs] == [epoch - 1, epoch, epoch, epoch]
    for sign in signs:
        sign.ClearField("epoch")
        assert sign == pb.RegisterRequest(
            worker_id="w1", address="10.0.0.1:7000", incarnation="i1", model_fingerprint="f1", draining=False, shard=0
        )
    registered = [line["epoch"] for line in logs if line["event"] == "registered"]
    assert registered == [1, 2]  # once each, not once for each sign of life


async def test_a_refused_worker_keeps_trying_and_says_why_once(registration: tuple[str, Registration]) -> None:
    address, _ = registration
    scheduler = Scheduler()
    scheduler.refusals = 2
    with structlog.testing.capture_logs() as logs:
        await scheduler.start(address)
        for _ in range(4):
            await scheduler.requests.get()
        await scheduler.server.stop(0)
    refused = [line for line in logs if line.get("status") == "FAILED_PRECONDITION"]
    assert [line["reason"] for line in refused] == ["another live worker has this worker_id"]


async def test_a_worker_is_taken_until_a_leader_refuses_it_and_not_only_until_its_leader_is_away() -> None:
    address = free_address()
    said: list[bool] = []
    registration = Registration(address, IDENTITY, on_accepted=said.append)
    keeping = asyncio.create_task(registration.keep_lease())
    try:
        leader = Scheduler()
        leader.refusals = 10**6
        await leader.start(address)
        await answered(leader)
        assert said and not any(said)
        leader.refusals = 0
        await until(lambda: said[-1])
        await leader.server.stop(0)
        said.clear()
        follower = Standby(None)  # a takeover: nobody leads, and this one knows nobody who does
        await follower.start(address)
        await answered(follower)
        assert False not in said
        follower.leads, follower.refusals = True, 10**6
        await until(lambda: False in said)
        await answered(follower)
        assert not said[-1]
        follower.refusals, follower.out_of_service = 0, "its answers were wrong"
        said.clear()
        await until(lambda: len(said) > 3)
        assert not any(said)
        follower.out_of_service = ""
        await until(lambda: said[-1])
        await follower.server.stop(0)
    finally:
        keeping.cancel()
        await registration.close()


async def test_a_worker_that_a_leader_has_registered_and_not_looked_at_is_not_taken() -> None:
    """A leader that cannot reach it, or finds it to be of another model, has answered its registration before."""
    address, said, streams = free_address(), list[bool](), list[str]()
    leader = Scheduler()
    await leader.start(address)
    registration = Registration(address, IDENTITY, on_accepted=said.append, has_stream=lambda: bool(streams))
    keeping = asyncio.create_task(registration.keep_lease())
    try:
        for _ in range(5):
            await answered(leader)
        assert True not in said
        streams.append("open")
        await until(lambda: True in said)
        leader.out_of_service = "its answers were wrong"
        await until(lambda: not said[-1])
    finally:
        keeping.cancel()
        await registration.close()
        await leader.server.stop(0)


async def test_a_worker_registers_on_after_an_answer_that_cannot_be_read(
    registration: tuple[str, Registration],
) -> None:
    address, worker = registration
    scheduler = Scheduler()
    scheduler.num_running = 2
    scheduler.num_unreadable["Register"] = 3
    await scheduler.start(address)
    await answered(scheduler)
    scheduler.num_unreadable["Register"] = 2
    await answered(scheduler)
    assert not scheduler.num_unreadable["Register"]
    scheduler.num_unreadable.update(("DrainWorker", "DrainWorker", "Register"))
    await worker.leave_scheduler(30.0)
    assert scheduler.drained == [pb.DrainWorkerRequest(worker_id="w1")] * 2
    await scheduler.server.stop(0)


async def test_a_worker_registers_on_whatever_a_registration_fails_with(
    registration: tuple[str, Registration],
) -> None:
    """Regression: gRPC raises KeyError for a status that it does not know, and the worker never registered again."""
    address, _ = registration
    scheduler = Scheduler()
    scheduler.num_damaged = 2
    await scheduler.start(address)
    async with asyncio.timeout(patient(20)):
        for _ in range(5):
            await scheduler.requests.get()
    assert not scheduler.num_damaged
    await scheduler.server.stop(0)


async def test_a_leaving_worker_says_so_and_waits_until_nothing_is_left_there(
    registration: tuple[str, Registration],
) -> None:
    address, worker = registration
    scheduler = Scheduler()
    scheduler.num_running = 4
    await scheduler.start(address)
    await answered(scheduler)
    await worker.leave_scheduler(30.0)
    assert scheduler.drained == [pb.DrainWorkerRequest(worker_id="w1")] * 4
    while not (await scheduler.requests.get()).draining:
        pass
    for _ in range(3):  # its lease goes on
        assert (await scheduler.requests.get()).draining
    await scheduler.server.stop(0)


async def test_a_leaving_worker_does_not_wait_for_ever(registration: tuple[str, Registration]) -> None:
    address, worker = registration
    scheduler = Scheduler()
    scheduler.num_running = 10_000
    await scheduler.start(address)
    await answered(scheduler)
    with structlog.testing.capture_logs() as logs:
        await worker.leave_scheduler(0.2)
    assert any("not drained in time" in line["event"] for line in logs)
    await scheduler.server.stop(0)


async def test_a_leaving_worker_that_has_no_scheduler_leaves_at_once(registration: tuple[str, Registration]) -> None:
    _, worker = registration
    with structlog.testing.capture_logs() as logs:
        await worker.leave_scheduler(30.0)
    assert any(line["event"] == "scheduler not told of draining" for line in logs)


class Standby(Scheduler):
    """Says who leads, until it leads itself."""

    def __init__(self, leader: str | None) -> None:
        super().__init__(epoch=2)
        self.leader = leader
        self.leads = False

    async def Register(
        self,
        request: pb.RegisterRequest,
        context: grpc.aio.ServicerContext[pb.RegisterRequest, pb.RegisterResponse],
    ) -> pb.RegisterResponse:
        if not self.leads:
            self.requests.put_nowait(request)
            raise NotLeaderError("this scheduler does not lead", self.leader)
        return await super().Register(request, context)


@asynccontextmanager
async def registered(schedulers: str) -> AsyncIterator[tuple[Registration, list[int]]]:
    epochs: list[int] = []
    registration = Registration(schedulers, IDENTITY, epochs.append)
    keeping = asyncio.create_task(registration.keep_lease())
    try:
        yield registration, epochs
    finally:
        keeping.cancel()
        await registration.close()


async def test_a_worker_follows_the_lead_from_one_of_its_addresses_to_the_other() -> None:
    addresses = [free_address(), free_address()]
    leader, standby = Scheduler(), Standby(addresses[0])
    await leader.start(addresses[0])
    await standby.start(addresses[1])
    async with registered(", ".join(addresses)) as (_, epochs):
        await answered(leader)
        assert epochs == [1]
        await standby.requests.get()  # it is asked as well, since it may follow
        standby.leads = True
        await leader.server.stop(0)
        while epochs != [1, 2]:
            await standby.requests.get()
    await standby.server.stop(0)


async def test_a_worker_goes_where_it_is_told_that_the_leader_is() -> None:
    leader = Scheduler()
    address = free_address()
    await leader.start(address)
    standby = Standby(address)
    await standby.start(known := free_address())
    async with registered(known) as (_, epochs):
        await answered(leader)
        assert epochs == [1]
    await asyncio.gather(leader.server.stop(0), standby.server.stop(0))


async def test_a_leader_that_was_followed_does_not_win_its_worker_back() -> None:
    """The old leader was frozen meanwhile, and does not know its successor yet."""
    addresses = [free_address(), free_address()]
    old, new = Scheduler(1), Scheduler(2)
    await new.start(addresses[1])
    async with registered(",".join(addresses)) as (_, epochs):
        await answered(new)
        await old.start(addresses[0])
        await answered(old)
        assert epochs == [2]
    await asyncio.gather(old.server.stop(0), new.server.stop(0))


async def test_a_worker_that_is_left_by_its_leader_asks_at_once() -> None:
    leader = Scheduler()
    leader.lease_ms = 3_600_000
    await leader.start(address := free_address())
    async with registered(address) as (registration, _):
        await leader.requests.get()
        async with asyncio.timeout(patient(20)):
            while leader.requests.empty():  # the first answer may still be on its way
                registration.register_now()
                await asyncio.sleep(0.01)
    await leader.server.stop(0)


class ScriptedNames(HostNames):
    """Stands for other addresses, on other ports too, than those that are asked for."""

    def __init__(self, found: Callable[[], list[str]]) -> None:
        super().__init__()
        self._stand_for = found

    async def resolve(self, addresses: Sequence[str], limit_s: float) -> list[str]:
        return self._stand_for()


async def test_names_are_looked_up_again_after_a_look_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the addresses of standbys, which were known, were dropped then."""
    monkeypatch.setattr(registration_module, "_RESOLVE_S", 0.1)
    scheduler = Scheduler()
    await scheduler.start(address := free_address())
    port = address.rpartition(":")[2]
    found = [["127.0.0.1", "127.0.0.2"], ["127.0.0.1"]]
    looks: list[list[str] | Exception] = [
        OSError("no such name"),
        found[0],
        *[OverflowError("getaddrinfo has had enough")] * 2,
        found[1],
    ]
    wanted: list[list[str]] = []  # at each look
    has_looked = asyncio.Event()

    async def look_up(host: str, port: int) -> list[str]:
        wanted.append(worker._wanted_addresses)
        if not looks:
            has_looked.set()
            return found[1]
        result = looks.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    worker = Registration(f"scheduler.invalid:{port}", IDENTITY, names=HostNames(look_up))
    with structlog.testing.capture_logs() as logs:
        keeping = asyncio.create_task(worker.keep_lease())
        async with asyncio.timeout(patient(20)):
            await scheduler.requests.get()
            await has_looked.wait()
        keeping.cancel()
        await worker.close()
    await scheduler.server.stop(0)
    written, both = [f"scheduler.invalid:{port}"], [f"127.0.0.1:{port}", f"127.0.0.2:{port}"]
    assert wanted[:6] == [written, written, both, both, both, written]
    assert [log["reason"] for log in logs if log["event"] == "schedulers not looked up"] == [
        "OSError('no such name')",
        "OverflowError('getaddrinfo has had enough')",
    ]


async def test_an_address_that_nobody_names_any_more_is_dropped() -> None:
    """A standby named it earlier, and names it no longer."""
    leader, lost = Scheduler(), Standby(None)
    await leader.start(leading := free_address())
    await lost.start(named := free_address())
    first = Standby(named)
    await first.start(known := free_address())
    lost.leader = leading
    num_asked: list[int] = []  # of the one in between, at each look

    def found() -> list[str]:
        num_asked.append(lost.requests.qsize())
        return [known]

    registration = Registration("scheduler.invalid:1", IDENTITY, names=ScriptedNames(found))
    keeping = asyncio.create_task(registration.keep_lease())
    async with asyncio.timeout(patient(60)):
        await leader.requests.get()
        first.leader = leading
        while len(num_asked) < 4 or num_asked[-2] < num_asked[-1]:  # it is asked several times between two looks
            await leader.requests.get()
    keeping.cancel()
    await registration.close()
    assert num_asked[-1] > 0
    await asyncio.gather(*(each.server.stop(0) for each in (leader, lost, first)))


async def test_an_epoch_that_no_scheduler_answers_with_any_more_is_followed_no_more() -> None:
    """After a loss of the store epochs are counted anew."""
    address, epochs = free_address(), list[int]()
    registration = Registration(address, IDENTITY, epochs.append, forget_epoch_s=0.3)
    keeping = asyncio.create_task(registration.keep_lease())
    for epoch in (7, 1):
        scheduler = Scheduler(epoch)
        await scheduler.start(address)
        while not epochs or epochs[-1] != epoch:
            sign = await scheduler.requests.get()
        while sign.epoch != epoch:
            sign = await scheduler.requests.get()
        await scheduler.server.stop(0)
    assert epochs == [7, 1]
    keeping.cancel()
    await registration.close()


def test_a_lower_epoch_is_not_followed_while_the_higher_one_is_fresh() -> None:
    followed = FollowedEpoch(forget_after_s=10)
    assert followed.confirm_epoch(7, 100.0) and not followed.confirm_epoch(7, 104.0)
    assert not followed.confirm_epoch(5, 113.0) and followed.epoch == 7
    assert followed.confirm_epoch(5, 114.1) and followed.epoch == 5
    assert followed.confirm_epoch(8, 114.2) and followed.epoch == 8
