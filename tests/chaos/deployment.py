"""Store, schedulers and workers of a scenario, each a real process that can be killed, frozen and started again.

Blocking waits run on threads, so that proxies in this process go on meanwhile.
"""

import asyncio
import math
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import quire
from quire.exit_code import EXIT_CONFIGURATION
from tests.chaos.chaos_store import ChaosStore
from tests.patience import patient
from tests.services import DEMO_MODEL, START_TIMEOUT_S, Service, free_address, start_scheduler

POLL_S = 0.005
ALL_FREE_S = 20.0
BUSY_TIMEOUT_S = 60.0
TRACEBACK = "Traceback (most recent call last)"


@dataclass(slots=True)
class Life:
    """One process of a role; another may follow it."""

    name: str
    service: Service
    is_struck_inside: bool = False  # it ends, but not by a signal to its own process
    _signals: list[signal.Signals] = field(default_factory=list)

    @property
    def has_crashed(self) -> bool:
        """True if it has ended, and was not told to, and does not say why: by a fault of its own."""
        if not self.is_over or self.is_struck_inside:
            return False
        code = self.service.wait()  # until all of its log is read
        in_order = {0, EXIT_CONFIGURATION, *(-number for number in self._signals)}
        return code not in in_order and not self.logged("scheduler ends")

    @property
    def num_tracebacks(self) -> int:
        """Lines of its log, or its last words, in which a traceback begins."""
        return sum(TRACEBACK in line for line in list(self.service.raw))

    @property
    def first_traceback(self) -> str:
        """Words in which the first traceback ends, with the event where it is logged; no paths. Empty without one."""
        for line in list(self.service.lines):
            if TRACEBACK in (told := str(line.get("exception", ""))):
                return f"{line.get('event')}: {told.strip().splitlines()[-1]}"
        raw = list(self.service.raw)
        begins = [index for index, line in enumerate(raw) if line.startswith(TRACEBACK)]
        words = (line.strip() for line in raw[begins[0] + 1 :] if not line[:1].isspace()) if begins else iter(())
        return next(words, "a traceback" if self.num_tracebacks else "")

    @property
    def is_over(self) -> bool:
        return self.service.process.poll() is not None

    def send(self, number: signal.Signals) -> float:
        """Send a signal; return the time, by the monotonic clock."""
        at_s = time.monotonic()
        self._signals.append(number)
        self.service.signal(number)
        return at_s

    def kill(self) -> float:
        """Kill by SIGKILL and wait for the end; return the time."""
        at_s = self.send(signal.SIGKILL)
        self.service.wait()
        return at_s

    def logged(self, event: str, after_s: float = -math.inf) -> list[dict[str, Any]]:
        """Read its log lines of an event, all or those since a moment.

        A moment is compared by the time of day that the process had: of one whose clock is set, ask for all.
        """
        return [line for line in list(self.service.lines) if line.get("event") == event and logged_s(line) >= after_s]


class Place:
    """Place that serves clients."""

    def __init__(self, client_address: str) -> None:
        self.client_address = client_address

    def client(self) -> quire.AsyncClient:
        """Client for questions about its state."""
        return quire.AsyncClient(self.client_address, connect_timeout_s=30.0)

    async def until_driven(self, *names: str) -> None:
        """Wait until the scheduler drives these workers."""
        async with self.client() as client, asyncio.timeout(patient(START_TIMEOUT_S)):
            while True:
                try:
                    stats = await client.stats()
                    if {worker.worker_id for worker in stats.workers} >= set(names):
                        return
                except quire.QuireError:
                    pass
                await asyncio.sleep(POLL_S * 10)

    async def until_busy(self, *names: str, timeout_s: float = BUSY_TIMEOUT_S) -> tuple[str, int]:
        """Wait until one of these workers has requests; return the one with most, and how many sequences it runs.

        A fault of a worker without requests proves nothing. Raises TimeoutError if none comes to have some.
        """
        async with self.client() as client, asyncio.timeout(patient(timeout_s)):
            while True:
                with suppress(quire.QuireError):
                    running = {each.worker_id: each.num_running for each in (await client.stats()).workers}
                    busiest = max(names, key=lambda name: running.get(name, 0))
                    if running.get(busiest, 0):
                        return busiest, running[busiest]
                await asyncio.sleep(POLL_S)

    async def leaked_blocks(self) -> int:
        """Count the blocks still held or queued, on devices and hosts, once all requests should have ended."""
        give_up_s = time.monotonic() + patient(ALL_FREE_S)
        async with self.client() as client:
            while True:
                stats = await client.stats()
                held = sum(each.blocks.used + each.used_host_blocks for each in stats.workers)
                held += stats.num_running + stats.num_waiting
                if not held or time.monotonic() > give_up_s:
                    return held
                await asyncio.sleep(POLL_S * 4)


class Deployment(Place):
    """One store; schedulers at one address, one after another; workers by name."""

    def __init__(
        self,
        *,
        scheduler_flags: Sequence[str] = (),
        num_blocks: int = 1024,
        num_host_blocks: int = 256,
        store: ChaosStore | None = None,
    ) -> None:
        self._stack = ExitStack()
        self.store: ChaosStore = self._stack.enter_context(store or ChaosStore())
        self.address = free_address()
        super().__init__(self.address)
        self.store_url = self.store.url  # a proxy's, where there is one
        self.schedulers: list[Life] = []
        self.workers: dict[str, Life] = {}
        self.lives: list[Life] = []  # of all schedulers and workers, also those that others have followed
        self.scheduler_flags = list(scheduler_flags)
        pool = ("--num-blocks", str(num_blocks), "--num-host-blocks", str(num_host_blocks))
        self.worker_flags = ["--threads", "1", *pool]
        self.worker_scheduler = self.address  # what workers are told

    @property
    def scheduler(self) -> Life:
        """Scheduler that was started last."""
        return self.schedulers[-1]

    @property
    def num_over(self) -> int:
        """Count the services that have ended, of those that were started last."""
        return sum(life.is_over for life in (self.scheduler, *self.workers.values()))

    async def begin(self, *workers: str) -> None:
        """Start a scheduler that drives these workers."""
        for name in workers:
            self.begin_worker(name)
        await self.begin_scheduler()
        await self.until_driven(*workers)

    async def begin_scheduler(
        self,
        *flags: str,
        address: str | None = None,
        listens: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Life:
        """Start a scheduler; with `listens`, wait until it has logged that it listens."""
        arguments = ("--store", self.store_url, *self.scheduler_flags, *flags)
        listen = address or self.address
        if listens and env is None:
            service, _ = await asyncio.to_thread(start_scheduler, *arguments, listen=listen)
        else:  # a fork has no environment of its own
            service = Service("scheduler_svc", "--listen", listen, *arguments, env=env)
        life = Life(f"scheduler-{len(self.schedulers)}", self._stack.enter_context(service))
        self.schedulers.append(life)
        self.lives.append(life)
        if listens:
            await asyncio.to_thread(service.wait_for, "listening")
        return life

    def begin_worker(
        self,
        name: str,
        *flags: str,
        module: str = "worker_svc",
        scheduler: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Life:
        """Start a worker, or the next of that name; it registers with the given scheduler or the common one."""
        where = ("--model", str(DEMO_MODEL), "--scheduler", scheduler or self.worker_scheduler)
        service = Service(module, *where, "--worker-id", name, *self.worker_flags, *flags, env=env)
        self.workers[name] = Life(name, self._stack.enter_context(service))
        self.lives.append(self.workers[name])
        return self.workers[name]

    def close(self) -> None:
        for life in (*self.schedulers, *self.workers.values()):
            if not life.is_over:
                life.send(signal.SIGCONT)
        self._stack.close()


async def logged(life: Life, event: str, after_s: float = -math.inf, timeout_s: float = 60.0) -> float:
    """Wait until a process logs an event after a moment; return that time by the monotonic clock."""
    give_up_s = time.monotonic() + patient(timeout_s)
    while not (lines := life.logged(event, after_s)):
        last = "".join(life.service.raw[-8:])
        assert time.monotonic() < give_up_s, f"{life.name} did not log {event!r} in {timeout_s:g} s; last:\n{last}"
        await asyncio.sleep(POLL_S)
    return logged_s(lines[0])


def logged_s(line: dict[str, Any]) -> float:
    """Time of a log line, by the monotonic clock."""
    ago_s = time.time() - datetime.fromisoformat(line["timestamp"]).timestamp()
    return time.monotonic() - ago_s
