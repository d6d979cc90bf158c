"""Services under supervision, with small processes in place of services: starts, ends, logs, what they tell."""

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

import quire
from quire.cli.serve_settings import settle_all
from quire.cli.supervisor.announcer import Announcer
from quire.cli.supervisor.child import Child, StartFailedError, module_command
from quire.cli.supervisor.data_folder import DataFolder
from quire.cli.supervisor.log_tail import echo_logs
from quire.cli.supervisor.service_log import ServiceLog
from quire.cli.supervisor.supervisor import Supervisor
from tests.patience import patient
from tests.quire.scripted_server import ScriptedServer
from tests.quire.serve_processes import runs
from tests.services import DEMO_MODEL

ENDLESS = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
)


class Restarts:
    """Reasons for a child's restarts, awaitable."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._news = asyncio.Event()

    def __call__(self, message: str) -> None:
        self.said.append(message)
        self._news.set()

    async def until(self, number: int) -> None:
        async with asyncio.timeout(patient(20)):
            while len(self.said) < number:
                await self._news.wait()
                self._news.clear()


def child(tmp_path: Path, code: str, restarts: Restarts) -> Child:
    command = [sys.executable, "-c", code]
    return Child("service", command, tmp_path / "service.log", (), restarts, ready_event="ready")


# Tells the supervisor, as our services do, that it is ready.
SAYS_READY = (
    "import os, sys; status = int(sys.argv[-1].partition('--status-fd=')[2]);"
    """os.write(status, b'no JSON\\n[1]\\n{"event": "ready"}\\n');"""
)


async def logged(path: Path, word: str, number: int = 1) -> None:
    """Waits for a word in a log."""

    def count() -> int:
        return path.read_text().count(word) if path.exists() else 0

    async with asyncio.timeout(patient(20)):
        while count() < number:  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)


async def test_a_child_that_is_killed_is_started_again(tmp_path: Path) -> None:
    restarts = Restarts()
    service = child(tmp_path, "import os; print(os.getpid(), flush=True);" + ENDLESS, restarts)
    supervising = asyncio.create_task(service.supervise(lambda: True))
    log = tmp_path / "service.log"
    await logged(log, "up")
    os.kill(int(log.read_text().split()[0]), signal.SIGKILL)
    await restarts.until(1)
    await logged(log, "up", 2)
    await service.end(10)
    await supervising
    assert "service was killed by signal 9; starting it again in 0.1 s" in restarts.said[0]


async def test_a_configuration_error_at_the_start_is_raised_with_its_sentence(tmp_path: Path) -> None:
    code = "import sys; print('{}'); print('service: the port is in use', file=sys.stderr); sys.exit(2)"
    with pytest.raises(StartFailedError, match=r"^service: the port is in use$") as caught:
        await child(tmp_path, code, Restarts()).supervise(lambda: False)
    assert caught.value.exit_code == 2


async def test_a_child_that_never_starts_is_given_up_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.supervisor.child.FIRST_BACKOFF_S", 0.01)
    restarts = Restarts()
    with pytest.raises(StartFailedError, match=r"exit code 1 5 times: ZeroDivisionError: division by zero") as caught:
        await child(tmp_path, "1 / 0", restarts).supervise(lambda: False)
    assert caught.value.exit_code == 1
    assert len(restarts.said) == 4


async def test_a_configuration_error_is_final_until_the_child_itself_was_ready(tmp_path: Path) -> None:
    """Even if other children are ready: once the child itself was ready, its failure may be temporary."""
    with pytest.raises(StartFailedError) as caught:
        await child(tmp_path, "raise SystemExit(2)", Restarts()).supervise(lambda: True)
    assert caught.value.exit_code == 2


async def test_once_it_has_been_ready_even_a_configuration_error_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.supervisor.child.FIRST_BACKOFF_S", 0.01)
    restarts = Restarts()
    mark = tmp_path / "mark"
    code = f"import pathlib; mark = pathlib.Path({str(mark)!r})\nif not mark.exists(): {SAYS_READY} mark.touch()\n"
    service = child(tmp_path, code + "raise SystemExit(2)", restarts)
    supervising = asyncio.create_task(service.supervise(lambda: True))
    await restarts.until(6)
    await service.end(10)
    await supervising
    assert "in 0.01 s" in restarts.said[0]
    assert "in 0.02 s" in restarts.said[1]


@pytest.mark.parametrize(("ready_s", "waits"), [(0.0, ["0.1", "0.1", "0.1"]), (60.0, ["0.1", "0.2", "0.4"])])
async def test_what_had_been_ready_is_started_again_at_once_and_what_dies_at_its_start_ever_later(
    tmp_path: Path, ready_s: float, waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.supervisor.child.READY_S", ready_s)
    restarts = Restarts()
    service = child(tmp_path, SAYS_READY + "os.kill(os.getpid(), 9)", restarts)
    supervising = asyncio.create_task(service.supervise(lambda: True))
    await restarts.until(3)
    await service.end(10)
    await supervising
    assert [message.partition("again in ")[2].partition(" s")[0] for message in restarts.said[:3]] == waits


async def test_what_had_been_ready_and_cannot_be_started_any_more_is_started_ever_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.supervisor.child.READY_S", 0.0)
    program = tmp_path / "program"
    program.symlink_to(sys.executable)
    code = f"{SAYS_READY} os.unlink({str(program)!r})"
    restarts = Restarts()
    service = Child("service", [str(program), "-c", code], tmp_path / "s.log", (), restarts, ready_event="ready")
    supervising = asyncio.create_task(service.supervise(lambda: True))
    await restarts.until(4)
    await service.end(10)
    supervising.cancel()
    await asyncio.wait({supervising})
    assert "cannot be started" in restarts.said[1]
    waits = [message.partition("again in ")[2].partition(" s")[0] for message in restarts.said[:4]]
    assert waits == ["0.1", "0.2", "0.4", "0.8"]


async def test_a_child_tells_how_far_it_is_as_long_as_it_lives(tmp_path: Path) -> None:
    told: list[dict[str, object]] = []
    code = """
import os, sys
status = int(sys.argv[-1].partition('--status-fd=')[2])
os.write(status, b'{"phase": "weights", "part": 0.5}\\n{"half')
os.write(status, b' a line": 1}\\n' + b'x' * 100_000 + b'\\n{"warning": "slow"}\\n')
raise SystemExit(2)
"""
    service = Child("s", [sys.executable, "-c", code], tmp_path / "s.log", (), print, ready_event="ready",
                    on_status=told.append)  # fmt: skip
    with pytest.raises(StartFailedError):
        await service.supervise(lambda: False)
    assert told == [{"started": True}, {"phase": "weights", "part": 0.5}, {"half a line": 1}, {"warning": "slow"}]


async def test_a_child_that_refuses_to_start_once_it_had_been_ready_is_started_again_with_its_reason(
    tmp_path: Path,
) -> None:
    mark = tmp_path / "mark"
    code = f"""
import os, pathlib, sys
mark = pathlib.Path({str(mark)!r})
if mark.exists():
    raise SystemExit(print("service: cannot listen on its port", flush=True) or 2)
mark.touch()
{SAYS_READY}
"""
    restarts = Restarts()
    service = child(tmp_path, code, restarts)
    supervising = asyncio.create_task(service.supervise(lambda: True))
    await restarts.until(2)
    mark.unlink()
    await service.end(10)
    await supervising
    assert restarts.said[0].startswith("service ended with exit code 0; starting it again")
    told = "service ended with exit code 2: service: cannot listen on its port; starting it again in "
    assert restarts.said[1].startswith(told)


async def test_what_a_child_has_said_counts_from_its_last_start(tmp_path: Path) -> None:
    first = f"import os, pathlib; mark = pathlib.Path({str(tmp_path / 'mark')!r})\nif not mark.exists(): "
    code = first + SAYS_READY + "mark.touch()\nprint(os.getpid(), flush=True); " + ENDLESS
    restarts = Restarts()
    service = child(tmp_path, code, restarts)
    log = tmp_path / "service.log"
    assert not service.has_reported("ready")  # it never was there
    supervising = asyncio.create_task(service.supervise(lambda: True))
    await logged(log, "up")
    async with asyncio.timeout(patient(20)):
        while not service.has_reported("ready"):  # noqa: ASYNC110 - told on another way than the log
            await asyncio.sleep(0.01)
    assert not service.has_reported("leading")
    os.kill(int(log.read_text().splitlines()[0]), signal.SIGKILL)
    await logged(log, "up", 2)
    await restarts.until(1)
    assert not service.has_reported("ready")
    await service.end(10)
    await supervising


async def test_a_child_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    """Children such as a compiler are killed too; for each way that the child may end."""
    code = (
        "import os, subprocess, sys, time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "print(f'started {other.pid}', flush=True)\n"
    )
    for number, rest in enumerate(("os.kill(os.getpid(), 9)", "raise SystemExit(2)", ENDLESS, STUBBORN)):
        log = tmp_path / f"{number}.log"
        service = Child("s", [sys.executable, "-c", code + rest], log, (), print, ready_event="ready")
        supervising = asyncio.create_task(service.supervise(lambda: True))
        await logged(log, "\n")
        if rest in (ENDLESS, STUBBORN):
            await logged(log, "up")
            await service.end(20 if rest is ENDLESS else 0.05)
        started = int(log.read_text().split()[1])
        async with asyncio.timeout(patient(20)):
            while runs(started):  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(0.01)
        service.kill()
        supervising.cancel()
        await asyncio.wait({supervising})
        if supervising.done() and not supervising.cancelled():
            assert isinstance(supervising.exception(), StartFailedError | None)


async def test_a_child_that_cannot_be_started_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.supervisor.child.FIRST_BACKOFF_S", 0.01)
    service = Child("service", [str(tmp_path / "nothing")], tmp_path / "s.log", (), print, ready_event="ready")
    with pytest.raises(StartFailedError, match=r"service cannot be started: .*nothing"):
        await service.supervise(lambda: False)


async def test_a_log_folder_that_is_gone_is_made_again(tmp_path: Path) -> None:
    restarts = Restarts()
    log = tmp_path / "logs" / "service.log"
    code = "import os; print(os.getpid(), flush=True);" + ENDLESS
    service = Child("service", [sys.executable, "-c", code], log, (), restarts, ready_event="ready")
    supervising = asyncio.create_task(service.supervise(lambda: True))
    await logged(log, "up")
    pid = int(log.read_text().split()[0])
    shutil.rmtree(log.parent)
    os.kill(pid, signal.SIGKILL)
    await logged(log, "up")
    await service.end(10)
    await supervising


def test_the_last_line_is_one_of_the_last_start_also_when_the_file_was_set_aside(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path / "service.log")
    (tmp_path / "service.log").write_text("of an earlier start\n")
    with log.begin() as file:
        assert log.last_line() == "it printed nothing"
        file.write(b"of this one\n")
    assert log.last_line() == "of this one"
    (tmp_path / "service.log").replace(tmp_path / "service.log.1")
    (tmp_path / "service.log").write_text("x\n")
    assert log.last_line() == "x"
    (tmp_path / "service.log").unlink()
    assert "cannot be read" in log.last_line()


def test_the_log_of_a_service_that_ends_before_it_logs_is_rotated_by_its_next_start(tmp_path: Path) -> None:
    """Regression: one that could not be imported any more was started again for ever, each time with a traceback."""
    log = ServiceLog(tmp_path / "service.log", max_bytes=1_000)
    with log.begin() as file:
        file.write(b"of the first start\n")
    with log.begin() as file:
        file.truncate(1_000)
    with log.begin() as file:
        file.write(b"of the last start\n")
    assert (tmp_path / "service.log").read_bytes() == b"of the last start\n" and log.last_line() == "of the last start"
    assert (tmp_path / "service.log.1").read_bytes().startswith(b"of the first start\n")


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    service = child(tmp_path, STUBBORN, Restarts())
    supervising = asyncio.create_task(service.supervise(lambda: True))
    await logged(tmp_path / "service.log", "up")
    await service.end(0.05)
    await supervising


async def test_an_impatient_end_kills_at_once(tmp_path: Path) -> None:
    service = child(tmp_path, STUBBORN, Restarts())
    supervising = asyncio.create_task(service.supervise(lambda: True))
    await logged(tmp_path / "service.log", "up")
    service.kill()
    await supervising


def test_a_module_is_not_looked_for_where_the_user_stands() -> None:
    assert module_command("scheduler_svc", "--x") == [sys.executable, "-P", "-m", "scheduler_svc", "--x"]


async def test_logs_are_echoed_line_by_line_as_they_grow_and_are_set_aside(tmp_path: Path) -> None:
    log, late = tmp_path / "service.log", tmp_path / "late.log"
    log.write_text("before\n")
    shown: list[str] = []

    async def until(number: int) -> None:
        async with asyncio.timeout(patient(20)):
            while len(shown) < number:  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.01)

    echoing = asyncio.create_task(echo_logs([log, late], shown.append))
    await asyncio.sleep(0)
    with log.open("a") as file:
        file.write("whole\npart")
    late.write_text("late\n")
    await until(2)
    with log.open("a") as file:
        file.write(" of a line\nlast of the old\n")
    log.replace(tmp_path / "service.log.1")
    log.write_text("first of the new\n")
    await until(5)
    echoing.cancel()
    assert sorted(shown[:2]) == ["late", "whole"]
    assert shown[2:] == ["part of a line", "last of the old", "first of the new"]


async def test_an_error_in_place_of_health_ends_no_deployment(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health is asked for again until it can greet."""
    monkeypatch.setattr("quire.cli.supervisor.supervisor.READY_AGAIN_S", 0.01)
    announcer, greeted = Announcer(), asyncio.Event()
    said: list[str] = []
    monkeypatch.setattr(announcer, "print_message", said.append)
    folder = DataFolder(tmp_path / "data")
    supervisor = Supervisor(settle_all({"model": str(DEMO_MODEL), "gateways": "0"}, None), folder, announcer)
    supervisor.address = server.address
    supervisor._gateways_listen.set()

    async def greet(_: Supervisor) -> None:
        greeted.set()

    server.refuse_health += [quire.OverloadedError("busy"), quire.RequestFailedError("a fault of the server")]
    async with asyncio.timeout(patient(20)):
        await supervisor._greet(greet)
    assert greeted.is_set() and said == ["a fault of the server"]
    await supervisor._end(asyncio.Event())
    folder.close()
