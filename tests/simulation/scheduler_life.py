"""One scheduler process: the production classes put together as `scheduler_svc.__main__` does, without gRPC.

Its store, its workers' links and its clients' connections are those of the simulation.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from common.waits import before, unless_failed
from quire.errors import QuireError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.api.session import ServerSession
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.leases import Lease
from scheduler_svc.journal.records import Records
from scheduler_svc.journal.store import FencedError, RecordLimits
from scheduler_svc.leadership.hot_journal import HotJournal
from scheduler_svc.leadership.lease_keeper import LeaseKeeper
from scheduler_svc.leadership.standby import Standby
from scheduler_svc.leadership.take_over import Attempt, Leading, TakeOver
from scheduler_svc.requests.admission import Admission
from scheduler_svc.requests.live.engine import Engine
from scheduler_svc.requests.live.fault_verdicts import FaultVerdicts
from scheduler_svc.requests.live.readers import Readers
from scheduler_svc.requests.prefixes.prefix_keeper import PrefixKeeper
from scheduler_svc.requests.prefixes.prefix_requests import Prefixes
from scheduler_svc.requests.queue_limits import AdmissionLimits
from scheduler_svc.requests.recovery.recovery import Recovery
from scheduler_svc.requests.request_control import RequestControl
from scheduler_svc.workers.workers import Workers
from tests.simulation.connection import Connection
from tests.simulation.history import History
from tests.simulation.journal_truth import JournalTruth
from tests.simulation.lease_client import LeaseClient, TailClient
from tests.simulation.losses import Losses
from tests.simulation.machine_clocks import MachineClock
from tests.simulation.scheduler_options import SchedulerOptions
from tests.simulation.store_client import StoreClient, Way
from tests.simulation.toy_worker import ToyLine, ToyWorker
from tests.simulation.virtual_loop import Process, VirtualLoop

RECORD_TTL_S = 3600
DRAIN_S = 0.3
LEAVE_S = 0.2  # for a standby that is told to end, too, to say so
LOOK_S = 0.125  # between looks for a standby while it drains
LEASE_MS = 1500
STORE_TIMEOUT_S = 30.0


class SchedulerLife:
    """Life of a scheduler process. `serves` is true once it has read the journal."""

    def __init__(
        self,
        loop: VirtualLoop,
        number: int,
        clock: MachineClock,
        way: Way,
        workers: dict[str, ToyWorker],
        options: SchedulerOptions,
        history: History,
        losses: Losses,
        on_end: Callable[["SchedulerLife"], None],
        on_lead: Callable[["SchedulerLife"], None],
        on_turn: Callable[["SchedulerLife"], None] | None = None,
    ) -> None:
        """Make a leader, or with `on_turn` a standby, which calls it, perhaps several times, when it gets the lease."""
        self.number = number
        self.process = Process(loop, f"scheduler-{number}", clock)
        self.serves = False
        self.way = way
        self.connections: list[Connection] = []
        self._store = StoreClient(way)
        self._leases = LeaseClient(way)
        self._on_lead = on_lead
        self._on_turn = on_turn
        self._cut = (0, 0.0)
        self._successors: list[str] = []  # addresses of standbys, of a leader that was told to end
        self._hot: HotJournal | None = None
        self._toy_workers = workers
        self._options = options
        self._history = history
        self._losses = losses
        self._on_end = on_end
        self.is_told_to_end = False
        self._told_to_end = asyncio.Event()
        self.process.context.run(self._new_attempt)
        self.process.spawn(self._run())

    def _new_attempt(self) -> Attempt:
        options = self._options
        self.journal = Journal(
            self._store,
            leader_id=self.process.name,
            trim_every=options.trim_every,
            restate_entries=options.restate_entries,
        )
        self.records = Records(self._store, limits=RecordLimits(ttl_s=RECORD_TTL_S))
        self.engine = Engine(
            Scheduler(options.config), self.journal, self.records, stream_interval_s=options.stream_interval_s
        )
        self.engine.faults.lose_worker = partial(self._lose_worker, self.engine)  # type: ignore[method-assign]
        self.readers = Readers(self.engine, grace_s=options.grace_s)
        self.recovery = Recovery(self.engine, self.readers)
        return Attempt(
            journal=self.journal,
            records=self.records,
            engine=self.engine,
            readers=self.readers,
            recovery=self.recovery,
        )

    def _lose_worker(self, engine: Engine, worker_id: str, reason: str, *, is_proven: bool) -> list[Sequence]:
        plans = [step.plan for step in engine.scheduler._places.workers[worker_id].in_flight]
        in_flight = {sequence.group for plan in plans for sequence in plan.sequences}
        self._losses.record({each.request_id for each in engine.live.values() if each.group in in_flight}, reason)
        return FaultVerdicts.lose_worker(engine.faults, worker_id, reason, is_proven=is_proven)

    def _build(self) -> None:
        """Build the serving parts, once this scheduler leads."""
        options = self._options
        limits = AdmissionLimits(max_queue_requests=options.max_queue_requests, max_queue_tokens=1_000_000)
        self.control = RequestControl(self.engine, self.recovery, limits)
        self.admission = Admission(self.engine, limits, self.readers, self.recovery, self.control)
        self.keeper = PrefixKeeper(self.engine, self.admission.in_flight_admissions_still_fit)
        self.prefixes = Prefixes(self.admission, self.keeper, is_enabled=options.config.enable_prefix_cache)

    @property
    def registry(self) -> Workers:
        return self.workers

    def accept(self, connection: Connection) -> None:
        """A client is there. In this process."""
        if self.serves:
            self.connections.append(connection)
            connection.serve(self.process.spawn(self._serve_session(connection)))
        else:
            connection.end_from_server()

    async def pause(self, request_id: str, *, keep_on_host: bool) -> None:
        """Pause a request, as a client would, and record the outcome."""
        try:
            await self.control.pause(request_id, keep_on_host=keep_on_host)
            self._history.note(f"{self.process.name} has paused {request_id}")
        except QuireError as error:
            self._history.note(f"{self.process.name} has not paused {request_id}: {error.message}")

    async def resume(self, request_id: str) -> None:
        try:
            await self.control.resume(request_id)
            self._history.note(f"{self.process.name} has resumed {request_id}")
        except QuireError as error:
            self._history.note(f"{self.process.name} has not resumed {request_id}: {error.message}")

    async def pin(self, request: pb.PinPrefixRequest) -> None:
        try:
            answer = await self.prefixes.pin(request)
            self._history.note(f"{self.process.name} has pinned {answer.prefix.num_blocks} blocks")
        except QuireError as error:
            self._history.note(f"{self.process.name} has not pinned {request.name}: {error.message}")

    async def unpin(self, request: pb.UnpinPrefixRequest) -> None:
        try:
            await self.prefixes.unpin(request)
        except QuireError as error:
            self._history.note(f"{self.process.name} has not unpinned {request.name}: {error.message}")

    def cut_in_take_over(self, num_commands: int, cut_s: float) -> None:
        """A standby whose way to the store breaks at a command that it sends once the lease is its own."""
        self._cut = (num_commands, cut_s)

    def knows_all(self, truth: JournalTruth) -> bool:
        """True if this standby has read of every request that has not ended, and will be able to tell it."""
        live = {each.number for each in truth.by_number.values() if each.state is None and not each.is_withdrawn}
        will_be_cut = self._cut != (0, 0.0) or self.way.is_cut
        has_read = self._hot is not None and live <= self._hot.replay.requests.keys()
        return has_read and self.process.runs and not will_be_cut

    def tell_to_end(self) -> None:
        """SIGTERM."""
        self.is_told_to_end = True
        self.process.call_later(0.0, self._told_to_end.set)

    def die(self) -> None:
        """Killed: clients see their connections break, nothing else happens."""
        self._history.note(f"{self.process.name} dies")
        self.serves = False
        self.process.kill()
        self.hang_up()

    def hang_up(self) -> None:
        connections, self.connections = self.connections, []
        for connection in connections:
            connection.end_from_server()

    async def _run(self) -> None:
        try:
            await self._serve()
        except (FencedError, QuireError) as error:
            self._history.note(f"{self.process.name} ends: {type(error).__name__}")
        self.serves = False
        self.process.kill()
        self.hang_up()
        self._on_end(self)

    async def _serve(self) -> None:
        leading = await self._lead()
        if leading is None:
            self._history.count("standby leaves" if self._hot is not None else "scheduler leaves before it leads")
            return
        epoch, lease, keeping_lease = leading.epoch, leading.lease, leading.keeping_lease
        self._build()
        self._on_lead(self)
        if self._options.config.enable_prefix_cache:
            self.keeper.restore(self.recovery.pins)
        fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.workers = Workers(
            self.engine,
            self.admission,
            self.keeper,
            epoch=epoch,
            send_whole=False,
            on_change=lambda driven: None,
            on_fatal=lambda error: None if fatal.done() else fatal.set_exception(error),
            make_link=lambda address: ToyLine(self._toy_workers[address], self.process),
        )
        running = [asyncio.create_task(each) for each in (self.journal.run(), self.records.run(), self.workers.watch())]
        running.append(keeping_lease)
        self._successors = []
        self.serves = True
        self._history.note(f"{self.process.name} serves in epoch {epoch}, {self.recovery.num_waiting} wait")
        try:
            await unless_failed(self._told_to_end.wait(), (fatal, *running))
            self.keeper.close()
            self._successors = await lease.standbys() or []
            if self._successors:
                await unless_failed(asyncio.sleep(LEAVE_S), (fatal, *running))
                self._successors = await lease.standbys() or []
            if not self._successors:
                await unless_failed(before(self._drain(), self._until_succeeded(lease)), (fatal, *running))
        finally:
            self.serves = False
            self.admission.closed = self.readers.closed = True
            self.keeper.close()
            await self.recovery.close()
            await self.workers.close()
            if self._successors and await self.journal.hand_over():
                self._history.count("scheduler hands over")
            await self.journal.close()
            await lease.release()
            self.hang_up()
            await self.records.close()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _lead(self) -> Leading | None:
        """None, and it is given up, if it is told to end first."""
        leading, ending = (
            asyncio.create_task(self._new_take_over().lead()),
            asyncio.create_task(self._told_to_end.wait()),
        )
        try:
            await asyncio.wait([leading, ending], return_when=asyncio.FIRST_COMPLETED)
            return leading.result() if leading.done() else None
        finally:
            for task in (leading, ending):
                task.cancel()
            await asyncio.gather(leading, ending, return_exceptions=True)

    def _new_take_over(self) -> TakeOver:
        me = Lease(self.process.name, self.process.name)
        standby = None
        if self._on_turn is not None:
            self._hot = HotJournal(TailClient(self.way), self._store, record_ttl_s=RECORD_TTL_S)
            standby = Standby(self._leases, me, self._hot, lease_ms=LEASE_MS, on_leader=lambda leader: None)
        return TakeOver(
            self._begin_attempt,
            self._store,
            self._leases,
            me,
            lease_ms=LEASE_MS,
            store_timeout_s=STORE_TIMEOUT_S,
            standby=standby,
            hot=self._hot,
        )

    def _begin_attempt(self) -> Attempt:
        if self._on_turn is not None:
            self._on_turn(self)
            self.way.cut_at(*self._cut)
            self._cut = (0, 0.0)
        return self._new_attempt()

    async def _until_succeeded(self, lease: LeaseKeeper) -> None:
        while not self._successors:
            await asyncio.sleep(LOOK_S)
            self._successors = await lease.standbys() or []

    async def _drain(self) -> None:
        self.readers.closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await self.admission.close()
                await self.engine.wait_until_empty()

    async def _serve_session(self, connection: Connection) -> None:
        session = ServerSession(self.admission, self.control)
        reading = asyncio.create_task(session.read(connection.requests()))
        try:
            while (response := await session.next_response()) is not None:
                await connection.send(response)
        finally:
            reading.cancel()
            session.close()
