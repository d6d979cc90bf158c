"""End of `quire serve`: none of its processes outlives it, for any way to end and any state of its terminal."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.cli.serve_settings import settle_all
from quire.cli.supervisor.announcer import Announcer
from quire.cli.supervisor.data_folder import DataFolder
from quire.cli.supervisor.supervisor import Supervisor
from tests.patience import patient
from tests.quire.serve_processes import ServeProcesses, child_commands
from tests.services import DEMO_MODEL, free_address

Starter = Callable[..., ServeProcesses]

# What is on the screen once there is a store to leave behind, and once everything runs.
STARTED, READY = "store ready", "Quire is ready"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Starter]:
    started: list[ServeProcesses] = []

    def start(*arguments: str, **options: object) -> ServeProcesses:
        started.append(ServeProcesses(tmp_path / "data", *arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.clean_up()


def names(serve: ServeProcesses) -> set[str]:
    """Names of the services that live."""
    known = ("valkey-server", "scheduler_svc", "worker_svc")
    return {name for command in serve.living().values() for name in known if name in command}


def comes_true(condition: Callable[[], bool]) -> bool:
    """True if the condition becomes true in time; a process that is not our child has no event."""
    return asyncio.run(_comes_true(condition))


async def _comes_true(condition: Callable[[], bool]) -> bool:
    try:
        async with asyncio.timeout(patient(100)):
            while not condition():  # noqa: ASYNC110 - as said above
                await asyncio.sleep(0.05)
    except TimeoutError:
        return False
    return True


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", [STARTED, READY])
def test_a_closed_terminal_ends_everything(serve: Starter, moment: str) -> None:
    running = serve(terminal=True)
    running.wait_for(moment)
    assert "valkey-server" in names(running)
    running.hang_up()
    assert running.wait() == 0
    assert running.living() == {}


@pytest.mark.timeout(300)
def test_a_closed_terminal_ends_everything_that_a_shell_had_started(serve: Starter) -> None:
    """The shell leads the session; the kernel tells the group in the foreground, and both may be told twice."""
    running = serve(terminal=True, through=("/bin/sh", "-c", '"$0" "$@"; true'))
    running.wait_for(READY)
    running.hang_up()
    running.wait()
    assert comes_true(lambda: not running.living()), running.living()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("keys", [b"\x03", b"\x1c"], ids=["ctrl-c", "ctrl-backslash"])
def test_a_key_that_ends_a_program_ends_everything(serve: Starter, keys: bytes) -> None:
    running = serve(terminal=True)
    running.wait_for(STARTED)
    running.type(keys)
    assert running.wait() == 0
    assert running.living() == {}


def test_every_signal_that_would_end_the_process_stops_it() -> None:
    """Regression: SIGPWR and those of real time, which managers of containers send, left the store behind."""
    program = """
import asyncio, os, signal
from quire.cli.supervisor.stop_signals import set_on_stop_signals

async def main():
    stop = asyncio.Event()
    set_on_stop_signals(stop)
    for number in (signal.SIGPWR, signal.SIGSTKFLT, signal.SIGABRT, signal.SIGRTMIN, signal.SIGRTMAX, signal.SIGXCPU):
        os.kill(os.getpid(), number)
        await stop.wait()
        stop.clear()

asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patient(30), check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGALRM", "SIGPWR"])
def test_every_signal_that_can_be_caught_ends_everything(serve: Starter, number: str) -> None:
    running = serve()
    running.wait_for(STARTED)
    running.process.send_signal(getattr(signal, number))
    assert running.wait() == 0
    assert running.living() == {}


@pytest.mark.timeout(300)
def test_a_pipe_that_nobody_reads_is_no_reason_to_fail(serve: Starter) -> None:
    """Closed pipes matter neither while it starts and runs, nor at its end."""
    running = serve("--verbose")
    running.wait_for(STARTED)
    running.hang_up()
    assert comes_true(lambda: {"scheduler_svc", "worker_svc"} <= names(running))
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0
    assert running.living() == {}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nohup_outlives_its_terminal_and_ends_when_it_is_told_to(serve: Starter) -> None:
    running = serve(terminal=True, through=("/usr/bin/env", "nohup"))
    assert comes_true(lambda: {"valkey-server", "scheduler_svc"} <= names(running)), running.said
    running.hang_up()
    with pytest.raises(Exception, match="timed out"):
        running.process.wait(2)  # long enough for a hang-up to be acted on, were it not ignored
    assert {"valkey-server", "scheduler_svc"} <= names(running)
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 0
    assert running.living() == {}


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_an_error_of_the_supervisor_itself_ends_everything(tmp_path: Path) -> None:
    before = set(child_commands(os.getpid()))
    addresses = {"listen": free_address(), "http": free_address()}
    settled = settle_all({"model": str(DEMO_MODEL), "num_blocks": "200", **addresses}, None)
    folder = DataFolder(tmp_path / "data")
    seen: list[set[int]] = []

    async def fail(_: Supervisor) -> None:
        seen.append(set(child_commands(os.getpid())) - before)
        raise ZeroDivisionError("as if we had made a mistake")

    with pytest.raises(ZeroDivisionError):
        await Supervisor(settled, folder, Announcer()).run(asyncio.Event(), fail)
    folder.close()
    assert len(seen[0]) == 4  # store, scheduler, worker, gateway
    assert not child_commands(os.getpid()).keys() - before
