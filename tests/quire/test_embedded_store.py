"""The embedded store as a real Valkey: started, adopted, watched, ended, private."""

import asyncio
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import redis.asyncio

from quire.cli.supervisor.data_folder import DataFolder
from quire.cli.supervisor.embedded_store import EmbeddedStore, StoreFailedError, find_binary
from tests.patience import patient
from tests.quire.serve_processes import runs
from tests.quire.test_supervision import Restarts


async def test_what_the_store_writes_is_private(folder: DataFolder, store: EmbeddedStore) -> None:
    await say(folder, "SET", "key", "value")
    found = [folder.socket, *folder.path.rglob("*")]
    assert any(each.name.endswith(".aof") for each in found)
    assert not [each for each in found if each.stat().st_mode & 0o077]


@pytest.mark.parametrize(
    "name", ["a#b", "a?b=c", "a%41", "a b+c&d", "a\nb", "snow 雪", "quo'te\"s", "\udcff no text", "@:" + "x" * 100]
)
async def test_the_schedulers_find_the_store_whatever_the_folder_is_called(name: str, tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / name)
    store = made_store(folder)
    try:
        await store.start()
        async with redis.asyncio.from_url(store.url, socket_timeout=patient(10)) as client:
            await say(folder, "SET", "key", "value")
            assert await client.get("key") == b"value"
    finally:
        await store.stop()
        folder.close()


async def test_the_log_of_the_store_is_set_aside_while_it_runs(folder: DataFolder, store: EmbeddedStore) -> None:
    tending = asyncio.create_task(store.rotate_log(1))
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
    await store.wait_gone()  # reaps it
    assert not runs(pid)


@pytest.mark.parametrize("adopted", [False, True])
async def test_once_the_store_has_gone_no_process_is_killed_in_its_place(
    folder: DataFolder, store: EmbeddedStore, adopted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: ending `quire serve` killed whoever had its process id by then."""
    ending = store
    if adopted:
        ending = made_store(folder)
        assert await ending.start() is True
    os.kill(await server_pid(folder), signal.SIGKILL)
    await store.wait_gone()
    folder.log("store").unlink()
    folder.log("store").mkdir()
    with pytest.raises(StoreFailedError, match="cannot be started"):
        await ending.start()
    killed: list[tuple[int, int]] = []
    with monkeypatch.context() as patched:
        patched.setattr("os.kill", lambda *given: killed.append(given))
        await ending.stop()
    assert not killed


async def test_a_store_whose_start_failed_is_not_killed_again(
    folder: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = EmbeddedStore(Path(sys.executable), folder.store, folder.socket, folder.log("store"))
    with pytest.raises(StoreFailedError, match="exit code 2"):
        await broken.start()
    killed: list[tuple[int, int]] = []
    with monkeypatch.context() as patched:
        patched.setattr("os.kill", lambda *given: killed.append(given))
        await broken.stop()
    assert not killed


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
    """True if a store answers with this reply."""
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
    watching = asyncio.create_task(store.wait_gone())
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


async def test_a_store_whose_folder_was_removed_begins_anew_in_a_private_one(
    folder: DataFolder, store: EmbeddedStore
) -> None:
    restarts = Restarts()
    keeping = asyncio.create_task(store.keep_running(restarts))
    await say(folder, "SET", "key", "lost")
    pid = await server_pid(folder)
    shutil.rmtree(folder.path)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(patient(20)):
        while not await answers(folder, b":0\r\n", "DBSIZE"):  # noqa: ASYNC110 - a start of its own has no event
            await asyncio.sleep(0.01)
    keeping.cancel()
    assert len(restarts.said) == 1
    assert not [each for each in (folder.path, *folder.path.rglob("*")) if each.stat().st_mode & 0o077]


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_store_whose_disk_is_full_says_so(
    folder: DataFolder, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    monkeypatch.setattr("quire.cli.supervisor.embedded_store.FULL_BYTES", (1 << 62) * is_full)
    said = Restarts()
    keeping = asyncio.create_task(store.keep_running(said))
    await say(folder, "SHUTDOWN")
    await said.until(1)
    keeping.cancel()
    assert (f"the disk of {folder.store} is full: make room" in said.said[0]) is is_full


async def test_a_store_that_cannot_start_says_where_its_log_is(folder: DataFolder) -> None:
    broken = EmbeddedStore(Path(sys.executable), folder.store, folder.socket, folder.log("store"))
    with pytest.raises(StoreFailedError, match=r"exit code 2; see .*store\.log"):
        await broken.start()


async def test_a_store_that_cannot_start_says_what_it_has_logged_itself(
    folder: DataFolder, store: EmbeddedStore
) -> None:
    await store.stop()
    manifest = next((folder.store / "appendonlydir").glob("*.manifest"))
    manifest.write_text("nonsense\n")
    with pytest.raises(StoreFailedError, match=r"exit code 1 \(.*manifest.*\); see .*store\.log"):
        await made_store(folder).start()


async def test_a_store_whose_file_is_damaged_says_how_to_mend_it(folder: DataFolder, store: EmbeddedStore) -> None:
    """A loss of power may leave it longer than what was written, by zeros."""
    await say(folder, "SET", "key", "value")
    await store.stop()
    (file,) = (folder.store / "appendonlydir").glob("*.incr.aof")
    with file.open("ab") as damaged:
        damaged.write(bytes(4096))
    with pytest.raises(StoreFailedError, match=f"cannot read its file {re.escape(str(file))}: it is damaged") as failed:
        await made_store(folder).start()
    command = shlex.split(str(failed.value).partition("damage, with: ")[2])
    mending = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=DEVNULL)
    await mending.communicate(b"y\n")
    assert mending.returncode == 0
    assert await store.start() is False
    assert await say(folder, "STRLEN", "key") == b":5\r\n"


async def test_a_store_that_cannot_start_on_a_full_disk_says_so(folder: DataFolder) -> None:
    full = Path("/proc")  # has no byte that is free
    broken = EmbeddedStore(Path(sys.executable), full, folder.socket, folder.log("store"))
    with pytest.raises(StoreFailedError, match=r"exit code 2 \(the disk of /proc is full: make room there\); see "):
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


@asynccontextmanager
async def answering(folder: DataFolder, *answers: bytes) -> AsyncIterator[None]:
    """A listener on the store's socket that gives these answers, one to each connection, and then is gone."""
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(left.pop(0))
        if not left:
            folder.socket.unlink()
            server.close()
        writer.close()

    server = await asyncio.start_unix_server(answer, folder.socket)
    try:
        yield
    finally:
        server.close()


@pytest.mark.parametrize("last", [b"-LOADING The store is loading\r\n", b"-BUSY with a script\r\n", b""])
async def test_a_store_that_ends_before_it_could_be_adopted_is_started(folder: DataFolder, last: bytes) -> None:
    store = made_store(folder)
    try:
        async with answering(folder, b"-LOADING The store is loading\r\n", last), asyncio.timeout(patient(20)):
            assert await store.start() is False
        assert await answers(folder, b"+PONG\r\n", "PING")
    finally:
        await store.stop()


async def test_a_store_that_ends_before_it_could_be_adopted_and_does_not_start_says_so(folder: DataFolder) -> None:
    broken = EmbeddedStore(Path(sys.executable), folder.store, folder.socket, folder.log("store"))
    with pytest.raises(StoreFailedError, match="exit code 2"):
        async with answering(folder, b"-LOADING The store is loading\r\n"), asyncio.timeout(patient(20)):
            await broken.start()


async def test_a_store_that_refuses_what_it_is_asked_is_not_waited_for(folder: DataFolder) -> None:
    refusal = b"-MISCONF Errors writing to the AOF file: No space left on device\r\n"
    async with answering(folder, refusal, b""), asyncio.timeout(patient(20)):
        with pytest.raises(StoreFailedError, match=r"refuses PING: -MISCONF Errors writing .* left on device"):
            await made_store(folder).start()


async def test_a_store_whose_log_cannot_be_opened_is_started_once_it_can(folder: DataFolder) -> None:
    log, said = folder.log("store"), Restarts()
    store = made_store(folder)
    await store.start()
    keeping = asyncio.create_task(store.keep_running(said))
    log.unlink()
    log.mkdir()
    await say(folder, "SHUTDOWN")
    await said.until(3)
    log.rmdir()
    async with asyncio.timeout(patient(20)):
        while not await answers(folder, b"+PONG\r\n", "PING"):  # noqa: ASYNC110 - a start of its own has no event
            await asyncio.sleep(0.01)
    keeping.cancel()
    await store.stop()
    assert "the embedded store cannot be started: [Errno 21]" in said.said[1] and str(log) in said.said[1]


async def test_a_running_store_is_adopted_though_temporary_files_have_another_place_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers would write one file; the path of this folder is too long for a socket in it."""
    long, stores = tmp_path / ("x" * 100), list[EmbeddedStore]()
    try:
        for name, is_adopted in (("a", False), ("b", True)):
            (tmp_path / name).mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
            folder = DataFolder(long)
            stores.append(made_store(folder))
            folder.close()
            assert await stores[-1].start() is is_adopted
    finally:
        for each in stores:
            await each.stop()
