"""The folder of a deployment: one user at a time, private to its owner."""

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from quire.cli.supervisor.data_folder import MAX_SOCKET_PATH, DataFolder, FolderError, FolderInUseError
from tests.patience import patient


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


def test_temporary_files_that_are_far_away_do_not_take_the_socket_of_a_long_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / ("t" * 90)
    far.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(far))
    folder = DataFolder(tmp_path / ("x" * 90))
    socket = folder.socket
    folder.close()
    assert len(str(socket)) <= MAX_SOCKET_PATH and socket.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(tempfile, "tempdir", "/proc/no/such/folder")  # nobody can write it
    assert DataFolder(tmp_path / ("y" * 90)).socket.parent == socket.parent


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
    with pytest.raises(FolderError, match=r"holds other files \(thesis\.txt\).*--data-dir"):
        DataFolder(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("taken", ["logs", "store"])
def test_a_file_in_place_of_a_folder_within_is_named(taken: str, tmp_path: Path) -> None:
    """Regression: `quire serve --data-dir x > x/logs` ended with a traceback."""
    (tmp_path / taken).write_text("x")
    folder = DataFolder(tmp_path)
    with pytest.raises(FolderError, match=rf"{taken} cannot be made.*--data-dir"):
        _ = folder.store if taken == "store" else folder.log("scheduler")
    folder.close()


def test_the_folder_of_a_volume_may_hold_what_its_file_system_puts_there(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    DataFolder(tmp_path).close()
