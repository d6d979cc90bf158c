"""Real scheduler with a scripted worker, a well-behaved client beside hostile ones, and its memory."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

import quire
from benchmarks.report import percentile
from quire.errors import QuireError
from quire.rpc import channel_options
from quire.v1 import cluster_pb2_grpc, worker_pb2
from tests.patience import patient
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.services import Service

MIB = 1 << 20
_SIGN_OF_LIFE_S = 0.3
_PROMPT = [1, 2, 3]
_NUM_TOKENS = 5
_PAUSE_S = 0.02


class Neighbour:
    """Asks one request after the other and keeps what became of each."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.num_answered = 0
        self.failures: list[str] = []
        self.latencies_s: list[float] = []
        self._answered = asyncio.Condition()

    async def ask_on(self) -> None:
        """Run until cancelled."""
        async with quire.AsyncClient(self._address, retries=0) as client:
            while True:
                began_s = time.perf_counter()
                try:
                    completion = await client.generate(_PROMPT, max_tokens=_NUM_TOKENS, ignore_eos=True)
                    if completion.samples[0].token_ids != (4, 5, 6, 7, 8):
                        self.failures.append(f"got {completion.samples[0].token_ids}")
                except QuireError as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                self.latencies_s.append(time.perf_counter() - began_s)
                async with self._answered:
                    self.num_answered += 1
                    self._answered.notify_all()
                await asyncio.sleep(_PAUSE_S)

    def p99_ms(self) -> float:
        """Compute p99 of the answers since `latencies_s` was emptied."""
        return 1e3 * percentile(self.latencies_s, 99)

    async def until_answered(self, number: int) -> None:
        """Wait for this many more answers."""
        wanted = self.num_answered + number
        async with asyncio.timeout(patient(60.0)), self._answered:
            await self._answered.wait_for(lambda: self.num_answered >= wanted)


class Besieged:
    """A scheduler under attack, and what is seen of it."""

    def __init__(self, service: Service, address: str) -> None:
        self.service = service
        self.address = address
        self.neighbour = Neighbour(address)
        self.peak_bytes = 0

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self.service.process.pid)

    async def watch_memory(self) -> None:
        """Keeps the most that the scheduler had. Until it is cancelled."""
        while True:
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
            await asyncio.sleep(0.01)

    async def until_resident_below(self, num_bytes: float, timeout_s: float = 60.0) -> int:
        """Waits until the scheduler has no more than this. Returns what it has, also if the time is over."""
        deadline_s = time.monotonic() + patient(timeout_s)
        while self.resident_bytes > num_bytes and time.monotonic() < deadline_s:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.1)
        return self.resident_bytes

    def log_lines(self, event: str) -> list[str]:
        return [str(line) for line in self.service.lines if line.get("event") == event]


@asynccontextmanager
async def besieged_scheduler(
    *arguments: str, listen: str = "127.0.0.1:0", tokenizer: worker_pb2.TokenizerFiles | None = None
) -> AsyncIterator[Besieged]:
    """Serve when the context begins; at its end the server must be alive and have logged no traceback."""
    worker = ScriptedWorker(num_blocks=256)
    if tokenizer is not None:
        worker.description.tokenizer.CopyFrom(tokenizer)
    # Not forked from one that has imported everything: its memory is all its own.
    with Service("scheduler_svc", "--listen", listen, *arguments) as service:
        said = str((await asyncio.to_thread(service.wait_for, "listening"))["address"])
        address = f"127.0.0.1:{said.rpartition(':')[2]}"
        await worker.start()
        site = Besieged(service, address)
        tasks = [asyncio.create_task(each) for each in (_keep_registered(worker, address), site.watch_memory())]
        try:
            await asyncio.to_thread(service.wait_for, "worker ready")
            tasks.append(asyncio.create_task(site.neighbour.ask_on()))
            await site.neighbour.until_answered(20)
            yield site
            assert service.process.poll() is None, "the scheduler has died"
            assert not [line for line in service.raw if "Traceback" in line], "".join(service.raw[-40:])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await worker.stop()


async def _keep_registered(worker: ScriptedWorker, address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=channel_options(16 * MIB)) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        while True:
            with contextlib.suppress(grpc.RpcError):
                await stub.Register(worker.registration())
            await asyncio.sleep(_SIGN_OF_LIFE_S)


def resident_bytes(pid: int) -> int:
    """Memory that a process has in use."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")
