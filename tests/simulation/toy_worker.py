"""A simulated worker process, and the line that a scheduler has to it in place of a WorkerLink.

It executes steps one after another in virtual time, and can be killed, told to end, frozen, cut off and made slow. An
answer to a line that is gone goes nowhere.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import grpc

from common.step import Step, StepResult, StepStatus
from quire.errors import UnavailableError
from quire.v1 import cluster_pb2, worker_pb2
from scheduler_svc.workers.worker_link import WorkerLink
from tests.simulation import toy_model
from tests.simulation.history import History
from tests.simulation.losses import CRASH
from tests.simulation.machine_clocks import MachineClock
from tests.simulation.toy_device import FatalStepError, ToyDevice
from tests.simulation.toy_fetch import ToyFetch, check_read
from tests.simulation.toy_registration import Leader, ToyRegistration
from tests.simulation.virtual_loop import Process, VirtualLoop
from worker_svc.service.followed_epoch import FollowedEpoch

LINE_DELAY_S = (0.0001, 0.001)
PING_TIMEOUT_S = 2.0
RETRY_S = 0.5
MODEL = worker_pb2.ModelInfo(
    name="toy",
    fingerprint="toy-1",
    architecture="Toy",
    dtype="float32",
    vocab_size=toy_model.VOCAB_SIZE,
    max_model_len=4096,
    eos_token_ids=[toy_model.EOS],
)


class ToyWorker:
    """One address, one incarnation after another."""

    def __init__(
        self,
        loop: VirtualLoop,
        random_: Random,
        history: History,
        clock: MachineClock,
        worker_id: str,
        pool: worker_pb2.PoolInfo,
        *,
        num_seats: int,
        role: "worker_pb2.WorkerRole.ValueType",
        step_s: tuple[float, float],
        find_leader: Callable[[], Leader | None],
        on_step: Callable[[], None],
        find_worker: Callable[[str], "ToyWorker | None"],
    ) -> None:
        self.worker_id = worker_id
        self.process = Process(loop, worker_id, clock)
        self.is_cut_off = False  # messages get lost, both ways
        self.slowness = 1.0
        self.loop = loop
        self.random = random_
        self._history = history
        self._pool = pool
        self._num_seats = num_seats
        self._role = role
        self._step_s = step_s
        self._find_leader = find_leader
        self._on_step = on_step
        self._find_worker = find_worker
        self._fetches: list[ToyFetch] = []
        self._decides_late = random_.random() < 0.5  # the scheduler, of steps for this worker
        self._incarnation = 0
        self._lines: list[ToyLine] = []
        self._queue: asyncio.Queue[tuple[ToyLine, Step, float]] = asyncio.Queue()
        self._followed = FollowedEpoch()
        self.device = self._new_device()
        self._registration = self._new_registration()

    def start(self) -> None:
        """A new incarnation, which knows nothing."""
        self._incarnation += 1
        self.process = Process(self.loop, f"{self.worker_id}-{self._incarnation}", self.process.clock)
        self.slowness = 1.0
        self.device = self._new_device()
        self._followed = FollowedEpoch()
        self._queue = asyncio.Queue()
        self.process.spawn(self._execute_all())
        self._registration = self._new_registration()
        self.process.spawn(self._registration.keep())

    @property
    def is_started(self) -> bool:
        return self._incarnation > 0

    def die(self, reason: str = "connection reset") -> None:
        """Every line of it breaks soon."""
        self._history.note(f"{self.process.name} dies")
        self.process.kill()
        self.break_lines(reason)

    def tell_to_end(self, patience_s: float, away_s: float) -> None:
        """SIGTERM: it lets what runs here end or move, for so long, and is started again later."""
        if not self._registration.is_leaving:
            self._history.note(f"{self.process.name} is told to end")
            self.process.spawn(self._leave(patience_s, away_s))

    async def _leave(self, patience_s: float, away_s: float) -> None:
        is_drained = await self._registration.leave(patience_s)
        self._history.count("worker leaves" if is_drained else "worker leaves with work undone")
        self.break_lines("the worker is shutting down")
        self.loop.outside(away_s, self.start)
        self.process.kill()

    def break_lines(self, reason: str) -> None:
        lines, self._lines = self._lines, []
        for line in lines:
            line.break_soon(reason)
        fetches, self._fetches = self._fetches, []
        for fetch in fetches:
            fetch.end(grpc.StatusCode.UNAVAILABLE)

    def freeze(self) -> None:
        """Freeze the worker; the scheduler's pings time out after a while."""
        self.process.freeze()
        self.loop.outside(PING_TIMEOUT_S, self._break_if_silent, self.process)

    def cut_off(self) -> None:
        self.is_cut_off = True
        self.loop.outside(PING_TIMEOUT_S, self._break_if_silent, self.process)

    def describe(self) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(
            worker_id=self.worker_id,
            incarnation=self.process.name,
            model=MODEL,
            pool=self._pool,
            num_seats=self._num_seats,
            role=self._role,
            max_batched_tokens=4096,
            device="cpu" if self._decides_late else "none",
        )

    @property
    def answers(self) -> bool:
        """True if a message from outside would be answered."""
        return self.process.runs and not self.is_cut_off

    def add_line(self, line: "ToyLine") -> None:
        self._lines.append(line)

    def fetch_blocks(self, request: worker_pb2.FetchBlocksRequest, owner: Process) -> ToyFetch:
        """Begin a fetch for the scheduler in a process."""
        fetch = ToyFetch(
            request,
            self.device,
            self.process,
            owner,
            self.random,
            is_cut_off=lambda: self.is_cut_off,
            find_source=self._find_source,
        )
        self._fetches = [each for each in self._fetches if not each.has_ended] + [fetch]
        self._history.count("fetch of blocks")
        return fetch

    def _find_source(self, request: worker_pb2.FetchBlocksRequest) -> ToyDevice | str:
        source = self._find_worker(request.source_address)
        if source is None or not source.answers or self.is_cut_off:
            return "nobody answers there"
        return check_read(request.source, source.process.name, source.device.epoch, "") or source.device

    def receive(self, line: "ToyLine", step: Step) -> None:
        """Receive a step in this worker's process."""
        self._queue.put_nowait((line, step, self.loop.time()))

    def _break_if_silent(self, process: Process) -> None:
        if process is self.process and not self.answers:
            self.break_lines("ping timeout")

    async def _execute_all(self) -> None:
        while True:
            line, step, received_s = await self._queue.get()
            began_s = self.loop.time()
            await asyncio.sleep(self.random.uniform(*self._step_s) * self.slowness)
            try:
                result = self.device.execute(step)
            except FatalStepError:
                self.die(CRASH)
                self.loop.outside(RETRY_S, self.start)
                return
            result.queue_ns = round((began_s - received_s) * 1e9)
            result.exec_ns = round((self.loop.time() - began_s) * 1e9)
            result.total_ns = result.queue_ns + result.exec_ns
            name = StepStatus(result.status).name
            self._history.note(
                f"{self.process.name} step {step.epoch}/{step.step_id} {name} {list(step.rows)} {result.token_ids}"
            )
            line.answer(result)
            self._on_step()

    def _reachable_leader(self) -> Leader | None:
        return None if self.is_cut_off else self._find_leader()

    def _follow(self, epoch: int) -> None:
        if self._followed.confirm_epoch(epoch, self.loop.time()):
            self.device.follow(epoch)

    def _new_registration(self) -> ToyRegistration:
        return ToyRegistration(
            self.loop,
            self.random,
            cluster_pb2.RegisterRequest(
                worker_id=self.worker_id,
                address=self.worker_id,
                incarnation=self.process.name,
                model_fingerprint=MODEL.fingerprint,
            ),
            find_leader=self._reachable_leader,
            epoch=lambda: self._followed.epoch,
            follow=self._follow,
        )

    def _new_device(self) -> ToyDevice:
        return ToyDevice(
            num_blocks=self._pool.num_blocks,
            num_host_blocks=self._pool.num_host_blocks,
            block_size=self._pool.block_size,
            num_seats=self._num_seats,
            violate=lambda sentence: self._history.violate(f"{self.process.name}: {sentence}"),
        )


class ToyLine(WorkerLink):
    """Made in the scheduler's process; `owner` is that. Has nothing of a WorkerLink but its interface: no channel."""

    def __init__(self, worker: ToyWorker, owner: Process) -> None:
        self.address = worker.worker_id
        self.news = asyncio.Event()
        self.results: deque[StepResult] = deque()
        self.broken: str | None = None
        self.is_damaged = False
        self.is_unreadable = False
        self._worker = worker
        self._owner = owner
        self._process: Process | None = None  # the incarnation at the other end
        self._last_s = 0.0  # when the last message in either direction arrives, since they keep their order

    async def describe(self, known_tokenizer_fingerprint: str) -> worker_pb2.DescribeResponse:
        await asyncio.sleep(self._worker.random.uniform(*LINE_DELAY_S))
        if not self._worker.answers:
            await asyncio.sleep(self._worker.random.choice([0.001, PING_TIMEOUT_S]))
            raise UnavailableError("worker does not answer")
        self._process = self._worker.process
        return self._worker.describe()

    def open(self, step_key: str = "") -> None:
        if self._worker.process is not self._process or not self._worker.answers:
            self.break_soon("connection refused")
            return
        self._worker.add_line(self)

    async def send(self, step: Step) -> None:
        if self.broken is None and self._process is not None and not self._worker.is_cut_off:
            self._deliver(self._process, self._worker.receive, self, _copied(step))

    def fetch_blocks(self, request: worker_pb2.FetchBlocksRequest, step_key: str) -> Any:
        """See WorkerLink.fetch_blocks."""
        return self._worker.fetch_blocks(request, self._owner)

    async def close(self) -> None:
        self._break("closed")

    def answer(self, result: StepResult) -> None:
        """Send an answer from the worker."""
        if not self._worker.is_cut_off:
            self._deliver(self._owner, self._take, result)

    def break_soon(self, reason: str) -> None:
        self._owner.call_later(self._worker.random.uniform(*LINE_DELAY_S), self._break, reason)

    def _deliver(self, process: Process, receive: Callable[..., None], *message: object) -> None:
        loop = self._worker.loop
        self._last_s = max(loop.now_s + self._worker.random.uniform(*LINE_DELAY_S), self._last_s + 1e-9)
        process.call_later(self._last_s - loop.now_s, receive, *message)

    def _take(self, result: StepResult) -> None:
        if self.broken is None:
            self.results.append(result)
            self.news.set()

    def _break(self, reason: str) -> None:
        if self.broken is None:
            self.broken = reason
        self.news.set()


def _copied(step: Step) -> Step:
    """Copy a step as the wire would: the scheduler goes on changing its tables."""
    for state in step.whole:
        state.block_table = list(state.block_table)
    return step
