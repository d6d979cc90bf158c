"""Services end at once when they are told to, though threads of theirs wait for what never comes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services import ROOT, Service
from tests.valkey import ValkeyProcess

SIMULATED = "benchmarks.services.simulated_worker"
RESOLVER = Path(__file__).with_name("silent_resolver.cpp")
END_S = 40.0  # on a busy machine; what they are held up by never ends


class Resolver:
    """Resolver of hosts *.quiet to this machine; once it is silent, lookups wait for ever."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._mark = folder / "silent"
        # gRPC's own way to ask a resolver would pass the library by.
        self.environment = {
            "LD_PRELOAD": str(library),
            "QUIET_FROM_NOW_ON": str(self._mark),
            "GRPC_DNS_RESOLVER": "native",
        }

    def be_silent(self) -> None:
        self._mark.touch()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("resolver") / "silent.so"
    compiler = os.environ.get("CXX") or "g++"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(RESOLVER), "-o", str(made), "-ldl"], check=True)
    return made


@pytest.fixture
def resolver(tmp_path: Path, library: Path) -> Resolver:
    return Resolver(tmp_path, library)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ValkeyProcess]:
    with ValkeyProcess() as process:
        yield process


def ends_well(service: Service) -> bool:
    service.signal(signal.SIGTERM)
    return service.wait(END_S) == 0


def test_a_worker_ends_though_its_schedulers_name_is_still_being_looked_up(resolver: Resolver) -> None:
    resolver.be_silent()
    with Service(SIMULATED, "--scheduler", "gone.quiet:7847", env=resolver.environment) as worker:
        worker.wait_for("schedulers not looked up")
        assert ends_well(worker)
        assert worker.wait_for("worker ended")


def test_scheduler_and_workers_end_though_everybodys_names_are_gone(
    resolver: Resolver, store: ValkeyProcess, tmp_path: Path
) -> None:
    environment = resolver.environment
    with Service("scheduler_svc", "--listen", "127.0.0.1:0", "--store", store.url, env=environment) as scheduler:
        port = scheduler.wait_for("listening")["address"].rpartition(":")[2]
        flags = ("--scheduler", f"scheduler.quiet:{port}", "--advertise", "worker.quiet")
        with Service(SIMULATED, *flags, env=environment) as worker:
            scheduler.wait_for("worker ready")
            resolver.be_silent()
            worker.kill()
        with Service(SIMULATED, *flags, env=environment) as worker:
            worker.wait_for("schedulers not looked up")
            assert ends_well(scheduler)
            assert ends_well(worker)


def test_a_scheduler_without_requests_ends_though_its_store_is_gone(resolver: Resolver, store: ValkeyProcess) -> None:
    with Service("scheduler_svc", "--listen", "127.0.0.1:0", "--store", store.url) as scheduler:
        scheduler.wait_for("listening")
        store.kill()
        scheduler.wait_for("lease not renewed")
        assert ends_well(scheduler)
        assert "journal closed with unwritten records" not in "".join(scheduler.raw)


@pytest.mark.parametrize("standby", [(), ("--standby",)])
def test_a_scheduler_that_waits_for_its_store_ends_well(resolver: Resolver, standby: tuple[str, ...]) -> None:
    resolver.be_silent()
    flags = ("--listen", "127.0.0.1:0", "--store", "redis://store.quiet:6379", *standby)
    with Service("scheduler_svc", *flags, env=resolver.environment) as scheduler:
        scheduler.wait_for("waiting for the store")
        assert ends_well(scheduler)


def test_a_process_ends_with_its_main_whatever_its_threads_wait_for() -> None:
    program = (
        "import asyncio, threading, time, common.process as p, common.refusal as r\n"
        "async def work():\n"
        "    asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)\n"
        "    threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        "def main():\n"
        "    p.run_service(work()); print('done'); {}\n"
        "p.end_after(main)\n"
    )
    for end, code, said in (
        ("", 0, ""),
        ("r.refuse_to_start('it', 'cannot')", 2, "it: cannot\n"),
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('a word')", 1, "a word\n"),
        ("raise ValueError('broken')", 1, "ValueError: broken\n"),
    ):
        command = [sys.executable, "-c", program.format(end or "pass")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=END_S, check=False)
        assert (done.returncode, done.stdout) == (code, "done\n")
        assert done.stderr.endswith(said)
