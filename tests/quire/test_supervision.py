"""The parts of `quire serve`, with small processes in place of services and a real Valkey."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio

from quire.cli.supervisor.child import Child, StartFailedError, module_command
from quire.cli.supervisor.data_folder import MAX_SOCKET_PATH, DataFolder, FolderInUseError
from quire.cli.supervisor.embedded_store import EmbeddedStore, StoreFailedError, find_binary
from quire.cli.supervisor.log_tail import echo_logs
from quire.cli.supervisor.places import PlaceError, dialled, probe_store, settle_listen, settle_next, without_password
from quire.cli.supervisor.service_log import ServiceLog
from tests.patience import patient

ENDLESS = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
)


class Restarts:
    """What a child was restarted for, awaitable."""

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


def says_ready(seconds_ago: float) -> str:
    """Code that logs as our services do that it is ready, as if it had been for a while."""
    moment = (datetime.now(UTC) - timedelta(seconds=seconds_ago)).isoformat()
    return f"print({json.dumps({'event': 'ready', 'timestamp': moment})!r}, flush=True);"


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


async def test_once_it_has_worked_even_a_configuration_error_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.supervisor.child.FIRST_BACKOFF_S", 0.01)
    restarts = Restarts()
    service = child(tmp_path, "raise SystemExit(2)", restarts)
    supervising = asyncio.create_task(service.supervise(lambda: True))
    await restarts.until(6)
    await service.end(10)
    await supervising
    assert "in 0.01 s" in restarts.said[0]
    assert "in 0.02 s" in restarts.said[1]


@pytest.mark.parametrize(("seconds_ago", "waits"), [(60.0, ["0.1", "0.1", "0.1"]), (-60.0, ["0.1", "0.2", "0.4"])])
async def test_what_had_been_ready_is_started_again_at_once_and_what_dies_at_its_start_ever_later(
    tmp_path: Path, seconds_ago: float, waits: list[str]
) -> None:
    restarts = Restarts()
    service = child(tmp_path, says_ready(seconds_ago) + "import os; os.kill(os.getpid(), 9)", restarts)
    supervising = asyncio.create_task(service.supervise(lambda: True))
    await restarts.until(3)
    await service.end(10)
    await supervising
    assert [message.partition("again in ")[2].partition(" s")[0] for message in restarts.said[:3]] == waits


def test_readiness_is_read_from_the_events_of_the_last_start_alone(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path / "service.log")
    with log.begin() as file:
        file.write(b'{"event": "ready", "timestamp": "2026-01-02T03:04:05.6Z"}\n')
        assert log.first_time_of("ready") is None  # not there yet
    assert log.first_time_of("ready") == datetime(2026, 1, 2, 3, 4, 5, 600_000, UTC)
    assert log.first_time_of("listening") is None
    with log.begin() as file:
        file.write(b'a line about "ready"\n["ready"]\n{"event": "ready"}\n{"other": "ready"}\n\xff "ready"\n')
    assert log.first_time_of("ready") is None
    assert log.last_lines()[0] == 'a line about "ready"'


async def test_what_a_child_has_said_counts_from_its_last_start(tmp_path: Path) -> None:
    first = f"import os, pathlib; mark = pathlib.Path({str(tmp_path / 'mark')!r})\nif not mark.exists(): "
    code = first + says_ready(0.0) + "mark.touch()\nprint(os.getpid(), flush=True); " + ENDLESS
    service = child(tmp_path, code, Restarts())
    log = tmp_path / "service.log"
    assert not service.has_said("ready")  # it never was there
    supervising = asyncio.create_task(service.supervise(lambda: True))
    await logged(log, "up")
    assert service.has_said("ready") and not service.has_said("leading")
    os.kill(int(log.read_text().splitlines()[1]), signal.SIGKILL)
    await logged(log, "up", 2)
    assert not service.has_said("ready")
    await service.end(10)
    await supervising


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


async def test_logs_are_echoed_line_by_line_as_they_grow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "service.log"
    log.write_text("before\n")
    echoing = asyncio.create_task(echo_logs([log, tmp_path / "late.log"]))
    await asyncio.sleep(0)
    with log.open("a") as file:
        file.write("whole\npart")
    (tmp_path / "late.log").write_text("late\n")
    shown = ""
    async with asyncio.timeout(patient(10)):
        while "late" not in shown or "whole" not in shown:
            await asyncio.sleep(0.01)
            shown += capsys.readouterr().err
    echoing.cancel()
    assert sorted(shown.splitlines()) == ["late", "whole"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DataFolder]:
    made = DataFolder(tmp_path / "data")
    yield made
    made.close()


def test_a_data_folder_has_one_user_at_a_time(folder: DataFolder) -> None:
    with pytest.raises(FolderInUseError, match="--data-dir"):
        DataFolder(folder.path)
    folder_again = folder.path
    other = DataFolder(folder_again.parent / "other")
    other.close()
    DataFolder(other.path).close()


async def test_a_new_supervisor_waits_for_the_services_of_a_killed_one(tmp_path: Path) -> None:
    code = f"""
import pathlib, signal, subprocess, sys
from quire.cli.supervisor.data_folder import DataFolder
import asyncio
folder = DataFolder(pathlib.Path({str(tmp_path)!r}))
asyncio.run(folder.await_old_services(lambda: None))
service = subprocess.Popen(
    [sys.executable, '-c', 'import signal; signal.pause()'],
    stdout=subprocess.DEVNULL,
    pass_fds=[folder.services_fd],
)
print(service.pid, flush=True)
signal.pause()
"""
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert supervisor.stdout is not None
    service_pid = int(await supervisor.stdout.readline())
    supervisor.kill()
    await supervisor.wait()
    folder = DataFolder(tmp_path)  # the supervisor's lock went with it
    told = asyncio.Event()
    waiting = asyncio.create_task(folder.await_old_services(told.set))
    await told.wait()
    assert not waiting.done()
    os.kill(service_pid, signal.SIGKILL)
    async with asyncio.timeout(patient(10)):
        await waiting
    folder.close()


def test_a_long_folder_keeps_its_socket_elsewhere_under_a_name_of_its_own(tmp_path: Path) -> None:
    folders = [DataFolder(tmp_path / ("x" * 90) / name) for name in ("a", "b")]
    sockets = [folder.socket for folder in folders]
    for folder in folders:
        folder.close()
    assert len(set(sockets)) == 2
    assert all(len(str(each)) <= MAX_SOCKET_PATH for each in sockets)
    assert DataFolder(folders[0].path).socket == sockets[0]


def test_a_large_log_is_set_aside(folder: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.supervisor.data_folder.MAX_LOG_BYTES", 10)
    folder.log("x").write_text("more than ten bytes")
    assert not folder.log("x").exists()
    assert (folder.path / "logs" / "x.log.1").read_text() == "more than ten bytes"


def made_store(folder: DataFolder, appendfsync: str = "always") -> EmbeddedStore:
    binary = find_binary()
    assert binary is not None
    return EmbeddedStore(binary, folder.store, folder.socket, folder.log("store"), appendfsync=appendfsync)


@pytest_asyncio.fixture
async def store(folder: DataFolder) -> AsyncIterator[EmbeddedStore]:
    made = made_store(folder)
    assert await made.start() is False
    yield made
    await made.stop()


async def say(folder: DataFolder, *words: str) -> bytes:
    reader, writer = await asyncio.open_unix_connection(folder.socket)
    writer.write((" ".join(words) + "\r\n").encode())
    reply = await reader.readline()
    if reply.startswith(b"*"):
        reply = b"".join([await reader.readline() for _ in range(4)])
    writer.close()
    return reply


async def answers(folder: DataFolder, reply: bytes, *words: str) -> bool:
    """Whether a store is there and says this."""
    try:
        return await say(folder, *words) == reply
    except OSError:
        return False


async def test_the_store_is_durable_by_its_settings(folder: DataFolder, store: EmbeddedStore) -> None:
    for name, value in (
        ("appendonly", b"yes"),
        ("appendfsync", b"always"),
        ("save", b""),
        ("maxmemory-policy", b"noeviction"),
        ("port", b"0"),
    ):
        assert (await say(folder, "CONFIG", "GET", name)).split(b"\r\n")[3] == value


async def test_a_running_store_is_adopted_and_a_stopped_one_keeps_its_data(
    folder: DataFolder, store: EmbeddedStore
) -> None:
    await say(folder, "SET", "key", "kept")
    successor = made_store(folder)
    assert await successor.start() is True
    await successor.stop()
    assert not folder.socket.exists()
    assert await store.start() is False
    reader, writer = await asyncio.open_unix_connection(folder.socket)
    writer.write(b"GET key\r\n")
    assert await reader.readline() == b"$4\r\n"
    writer.close()


async def test_an_adopted_store_syncs_as_the_adopter_was_told(folder: DataFolder, store: EmbeddedStore) -> None:
    assert await made_store(folder, "everysec").start() is True
    assert (await say(folder, "CONFIG", "GET", "appendfsync")).split(b"\r\n")[3] == b"everysec"
    assert await made_store(folder).start() is True
    assert (await say(folder, "CONFIG", "GET", "appendfsync")).split(b"\r\n")[3] == b"always"


async def test_the_end_of_the_store_is_seen(folder: DataFolder, store: EmbeddedStore) -> None:
    watching = asyncio.create_task(store.gone())
    reader, writer = await asyncio.open_unix_connection(folder.socket)
    writer.write(b"INFO server\r\n")
    info = await reader.readuntil(b"process_id:")
    assert info
    pid = int(await reader.readline())
    assert not watching.done()
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(patient(10)):
        await watching
    writer.close()
    assert await store.start() is False


async def test_a_store_that_ends_is_started_again_as_soon_as_it_can_be(folder: DataFolder, tmp_path: Path) -> None:
    binary, disk_is_full, said = tmp_path / "server", tmp_path / "full", Restarts()
    binary.write_text(f'#!/bin/sh\n[ ! -e {disk_is_full} ] || exit 3\nexec {find_binary()} "$@"\n')
    binary.chmod(0o700)
    store = EmbeddedStore(binary, folder.store, folder.socket, folder.log("store"))
    await store.start()
    await say(folder, "SET", "key", "kept")
    keeping = asyncio.create_task(store.keep_running(said))
    disk_is_full.touch()
    await say(folder, "SHUTDOWN")
    await said.until(3)
    disk_is_full.unlink()
    async with asyncio.timeout(patient(20)):
        while not await answers(folder, b":1\r\n", "EXISTS", "key"):  # noqa: ASYNC110 - a start of its own has no event
            await asyncio.sleep(0.01)
    keeping.cancel()
    await store.stop()
    assert said.said[0].startswith("the embedded store ended; starting it again in ")
    assert "exit code 3" in said.said[1] and said.said[2].endswith("starting it again in 0.4 s")


async def test_a_store_that_cannot_start_says_where_its_log_is(folder: DataFolder) -> None:
    broken = EmbeddedStore(Path(sys.executable), folder.store, folder.socket, folder.log("store"))
    with pytest.raises(StoreFailedError, match=r"exit code 2; see .*store\.log"):
        await broken.start()


async def test_a_store_that_does_not_answer_is_not_replaced(
    folder: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.supervisor.embedded_store.ANSWER_S", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder.socket))
        listener.listen()
        with pytest.raises(StoreFailedError, match="does not answer"):
            await made_store(folder).start()


def test_port_zero_becomes_a_port_and_a_port_in_use_is_refused() -> None:
    address = settle_listen("127.0.0.1:0")
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    with socket.create_server((host, int(port))), pytest.raises(PlaceError, match="--listen"):
        settle_listen(address)
    with pytest.raises(PlaceError, match="--listen"):
        settle_listen("127.0.0.1:99999")
    with pytest.raises(PlaceError, match="--listen"):
        settle_listen("203.0.113.1:0")  # not an address of this machine


def test_a_second_server_takes_the_next_port_or_any_that_is_free() -> None:
    host = "127.0.0.1"
    with socket.create_server((host, 0)) as neighbour:
        taken = int(neighbour.getsockname()[1])
        other = settle_next(f"{host}:{taken - 1}")
        assert other not in (f"{host}:{taken - 1}", f"{host}:{taken}")
    assert settle_next(f"{host}:{taken - 1}") == f"{host}:{taken}"
    assert settle_next(f"{host}:65535") != f"{host}:65535"


def test_what_listens_everywhere_is_dialled_here() -> None:
    assert dialled("0.0.0.0:7847") == "127.0.0.1:7847"
    assert dialled("[::]:7847") == "[::1]:7847"
    assert dialled("192.0.2.7:1") == "192.0.2.7:1"


async def test_an_absent_store_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(PlaceError, match=r"redis://user:\*\*\*@127\.0\.0\.1:1/0 cannot be reached"):
        await probe_store("redis://user:secret@127.0.0.1:1/0")
    with pytest.raises(PlaceError, match="cannot be reached"):
        await probe_store(f"unix://{tmp_path}/nothing")
    assert without_password("redis://host:1/2") == "redis://host:1/2"


@pytest.mark.parametrize(
    ("answer", "is_store"), [(b"+PONG\r\n", True), (b"-NOAUTH\r\n", True), (b"HTTP/1.1 400", False)]
)
async def test_what_is_no_store_is_told_by_its_answer(answer: bytes, is_store: bool) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"PING\r\n"
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as listener:
        url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        if is_store:
            await probe_store(url)
        else:
            with pytest.raises(PlaceError, match="neither Redis nor Valkey"):
                await probe_store(url)


async def test_a_store_that_keeps_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.supervisor.places.PROBE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(PlaceError, match="no answer"):
        await probe_store(f"redis://127.0.0.1:{listener.getsockname()[1]}")
