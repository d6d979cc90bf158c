"""Real service processes for tests: started, awaited, killed. Nothing here sleeps to synchronise.

A process's readiness is read from its own log lines; its whole log is shown when it fails. Schedulers and workers of
`start_scheduler` and `start_worker` are forked from a process that has imported them, unless coverage is traced, which
does not follow a fork.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tests.forked_process import ForkedProcess
from tests.patience import patient

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = ROOT / "demo" / "model"
START_TIMEOUT_S = 90.0  # torch is slow to import
_IS_TRACED = any(name.startswith("COVERAGE_") for name in os.environ)
_PORTS_A_PROCESS = 1_400
_MOST_PROCESSES = 16  # of a test run


class Service:
    """One process and its JSON log lines."""

    def __init__(
        self, module: str, *arguments: str, env: Mapping[str, str] | None = None, may_fork: bool = False
    ) -> None:
        self.lines: list[dict[str, Any]] = []
        self.raw: list[str] = []
        self._changed = threading.Condition()
        self._closed = False
        self.process: ForkedProcess | subprocess.Popen[str]
        if may_fork and not _IS_TRACED:
            self.process = ForkedProcess(module, arguments, ROOT)
        else:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **(env or {})},
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.raw.append(line)
                if line.startswith("{"):
                    try:
                        self.lines.append(json.loads(line))
                    except json.JSONDecodeError as error:
                        raise AssertionError(f"a log line that is not one object: {line!r}") from error
                self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for(self, event: str, number: int = 1, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """The `number`th log line of this event."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines if line.get("event") == event]

        with self._changed:
            self._changed.wait_for(lambda: len(found()) >= number or self._closed, patient(timeout_s))
            lines = found()
        if len(lines) < number:
            raise AssertionError(f"no {event!r} in the log of {self.process.args!r}:\n" + "".join(self.raw[-40:]))
        return lines[number - 1]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Waits for its end. Returns the exit code."""
        code = self.process.wait(patient(timeout_s))
        self._reader.join(patient(timeout_s))
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.signal(signal.SIGTERM)
        code = self.wait()
        self.kill()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()


def start_scheduler(*arguments: str, listen: str = "127.0.0.1:0") -> tuple[Service, str]:
    """A scheduler that listens, and its address."""
    service = Service("scheduler_svc", "--listen", listen, *arguments, may_fork=True)
    try:
        return service, str(service.wait_for("listening")["address"])
    except BaseException:
        service.kill()
        raise


def _own_ports() -> Iterator[int]:
    """Ports of this process in turn, again and again; other test runs on the machine begin elsewhere."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _MOST_PROCESSES
    first = 10_000 + number * _PORTS_A_PROCESS
    for offset in count(os.getpid() * 31):
        yield first + offset % _PORTS_A_PROCESS


_ports = _own_ports()


def free_address() -> str:
    """An address on which nothing listens now, and that nobody is given meanwhile.

    Its port is none of those that the system gives to connections (32768 and above, unless it is configured so), and
    each process of a test run has ports of its own.
    """
    for _ in range(_PORTS_A_PROCESS):
        port = next(_ports)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"
    raise RuntimeError("no port is free")


def start_worker(scheduler: str, *arguments: str, model: Path = DEMO_MODEL) -> Service:
    """A worker that has been told where its scheduler is; wait for "worker ready" in the scheduler's log."""
    return Service("worker_svc", "--model", str(model), "--scheduler", scheduler, *arguments, may_fork=True)


def start_gateway(scheduler: str, *arguments: str, env: Mapping[str, str] | None = None) -> tuple[Service, str]:
    """A gateway that listens, and its URL. It waits as long for a scheduler as one may take to start."""
    env = {"QUIRE_GATEWAY_SCHEDULER_TIMEOUT_S": str(patient(START_TIMEOUT_S)), **(env or {})}
    service = Service("gateway_svc", "--listen", "127.0.0.1:0", "--scheduler", scheduler, *arguments, env=env)
    try:
        return service, f"http://{service.wait_for('listening')['address']}"
    except BaseException:
        service.kill()
        raise


class RunningServices(NamedTuple):
    """A scheduler, a worker that it drives, and a gateway before them."""

    scheduler: Service
    worker: Service
    gateway: Service
    address: str  # of the scheduler
    url: str  # of the gateway


@contextmanager
def running_services(
    *worker_options: str, model: Path = DEMO_MODEL, scheduler_options: Sequence[str] = ()
) -> Iterator[RunningServices]:
    """Services of a model, ready to serve it until the block ends."""
    with ExitStack() as stack:
        scheduler, address = start_scheduler(*scheduler_options)
        stack.enter_context(scheduler)
        worker = stack.enter_context(start_worker(address, *worker_options, model=model))
        gateway, url = start_gateway(address)
        stack.enter_context(gateway)
        scheduler.wait_for("worker ready")
        yield RunningServices(scheduler, worker, gateway, address, url)
