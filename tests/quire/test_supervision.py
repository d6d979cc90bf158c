"""The parts of `quire serve`, with small processes in place of services and a real Valkey."""

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from quire.cli.supervisor.child import Child, StartFailedError, module_command
from quire.cli.supervisor.data_folder import MAX_SOCKET_PATH, DataFolder, FolderError, FolderInUseError
from quire.cli.supervisor.embedded_store import EmbeddedStore, StoreFailedError, find_binary
from quire.cli.supervisor.log_tail import echo_logs
from quire.cli.supervisor.places import PlaceError, dialled, probe_store, settle_listen, settle_next
from quire.cli.supervisor.service_log import ServiceLog
from tests.patience import patient
from tests.quire.test_serve import runs

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
    """Whatever else works already; once it has worked, what it needs may come back."""
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


async def test_what_a_child_has_said_counts_from_its_last_start(tmp_path: Path) -> None:
    first = f"import os, pathlib; mark = pathlib.Path({str(tmp_path / 'mark')!r})\nif not mark.exists(): "
    code = first + SAYS_READY + "mark.touch()\nprint(os.getpid(), flush=True); " + ENDLESS
    restarts = Restarts()
    service = child(tmp_path, code, restarts)
    log = tmp_path / "service.log"
    assert not service.has_said("ready")  # it never was there
    supervising = asyncio.create_task(service.supervise(lambda: True))
    await logged(log, "up")
    async with asyncio.timeout(patient(20)):
        while not service.has_said("ready"):  # noqa: ASYNC110 - told on another way than the log
            await asyncio.sleep(0.01)
    assert not service.has_said("leading")
    os.kill(int(log.read_text().splitlines()[0]), signal.SIGKILL)
    await logged(log, "up", 2)
    await restarts.until(1)
    assert not service.has_said("ready")
    await service.end(10)
    await supervising


async def test_a_child_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    """Such as a compiler, which knows nothing of the end; whether it ends by itself, is told to, or is killed."""
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
        assert log.last_line() == "it said nothing"
        file.write(b"of this one\n")
    assert log.last_line() == "of this one"
    (tmp_path / "service.log").replace(tmp_path / "service.log.1")
    (tmp_path / "service.log").write_text("x\n")
    assert log.last_line() == "x"
    (tmp_path / "service.log").unlink()
    assert "cannot be read" in log.last_line()


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


def test_a_data_folder_is_private_also_when_it_was_not(tmp_path: Path) -> None:
    path = tmp_path / "data"
    (path / "logs").mkdir(parents=True, mode=0o755)
    (path / "store" / "appendonlydir").mkdir(parents=True)
    files = [path / "logs" / "x.log", path / "store" / "appendonlydir" / "a.aof", path / "serve.lock"]
    for file in files:
        file.write_text("what somebody asked")
        file.chmod(0o644)
    for each in (path, path / "logs", path / "store", path / "store" / "appendonlydir"):
        each.chmod(0o755)
    (path / "logs" / "elsewhere").symlink_to(tmp_path)
    before = tmp_path.stat().st_mode
    DataFolder(path).close()
    found = [path, *(each for each in path.rglob("*") if not each.is_symlink())]
    assert len(found) == 8
    assert not [each for each in found if each.stat().st_mode & 0o077]
    assert tmp_path.stat().st_mode == before


def test_a_folder_with_other_things_is_neither_used_nor_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    tmp_path.chmod(0o755)
    with pytest.raises(FolderError, match=r"holds other things \(thesis\.txt\).*--data-dir"):
        DataFolder(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_folder_of_a_volume_may_hold_what_its_file_system_puts_there(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    DataFolder(tmp_path).close()


async def test_what_the_store_writes_is_private(folder: DataFolder, store: EmbeddedStore) -> None:
    await say(folder, "SET", "key", "value")
    found = [folder.socket, *folder.path.rglob("*")]
    assert any(each.name.endswith(".aof") for each in found)
    assert not [each for each in found if each.stat().st_mode & 0o077]


async def test_the_log_of_the_store_is_set_aside_while_it_runs(folder: DataFolder, store: EmbeddedStore) -> None:
    tending = asyncio.create_task(store.tend_log(1))
    log = folder.log("store")
    async with asyncio.timeout(patient(20)):
        while not log.with_name("store.log.1").exists():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)
    tending.cancel()
    await store.stop()  # of which it tells
    assert "ready to exit" in log.read_text().lower() or "exiting" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("adopted", [False, True])
async def test_a_store_that_does_not_end_when_told_is_killed(
    folder: DataFolder, store: EmbeddedStore, adopted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cli.supervisor.embedded_store.STOP_S", 0.2)
    ending = store
    if adopted:
        ending = made_store(folder)
        assert await ending.start() is True
    pid = await server_pid(folder)
    os.kill(pid, signal.SIGSTOP)
    await ending.stop()
    await store.gone()  # reaps it
    assert not runs(pid)


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


async def server_pid(folder: DataFolder) -> int:
    reader, writer = await asyncio.open_unix_connection(folder.socket)
    try:
        writer.write(b"INFO server\r\n")
        assert await reader.readuntil(b"process_id:")
        return int(await reader.readline())
    finally:
        writer.close()


async def test_the_end_of_the_store_is_seen(folder: DataFolder, store: EmbeddedStore) -> None:
    watching = asyncio.create_task(store.gone())
    pid = await server_pid(folder)
    assert not watching.done()
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(patient(10)):
        await watching
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
    for url in ("redis://:pa/ss-secret@127.0.0.1:1", "redis://u:p#secret@h", "redis://127.0.0.1:1?password=secret"):
        with pytest.raises(PlaceError) as caught:
            await probe_store(url)
        assert (
            "secret" not in str(caught.value) and "pa/ss" not in str(caught.value) and "'pa'" not in str(caught.value)
        )


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
