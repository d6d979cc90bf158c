"""`quire serve` and the processes that it starts, found by a mark: on a terminal of its own or elsewhere.

The mark is a variable, which every process inherits whoever its parent is by now; the store, which writes its title
over its variables, has the data folder in it.
"""

import os
import pty
import select
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.patience import patient
from tests.services import DEMO_MODEL, free_address

WAIT_S = patient(100)
_MARK = "SERVE_PROCESSES_MARK"
# Makes the terminal on standard input the controlling one, as a login does, and becomes the command.
_LOG_IN = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class ServeProcesses:
    """One `quire serve` on the demo model."""

    def __init__(
        self,
        data_dir: Path,
        *arguments: str,
        terminal: bool = False,
        through: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it.

        Args:
            data_dir: its data folder.
            arguments: more of its arguments.
            terminal: give it a terminal, which `hang_up` closes; else it writes to a pipe.
            through: a command that runs it, which is given its words as arguments.
            environment: more variables.
        """
        self._data_dir = data_dir
        self.mark = uuid.uuid4().hex
        command = [
            *(*through, sys.executable, "-m", "quire.cli", "serve", str(DEMO_MODEL), "--listen", free_address()),
            *("--data-dir", str(data_dir), "--num-blocks", "200", "--http", free_address(), *arguments),
        ]
        inherited = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
        env = {**inherited, _MARK: self.mark, "COLUMNS": "300", **(environment or {})}
        if terminal:
            self._ours, theirs = pty.openpty()
            command = [sys.executable, "-c", _LOG_IN, *command]
        else:
            self._ours, theirs = os.pipe()
        self.process = subprocess.Popen(
            command, stdin=theirs if terminal else subprocess.DEVNULL, stdout=theirs, stderr=theirs,
            env=env, start_new_session=terminal, cwd=data_dir.parent,
        )  # fmt: skip
        os.close(theirs)
        self._said = b""
        self._changed = threading.Condition()
        self._is_read = True
        self._woken, self._wake = os.pipe()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def said(self) -> str:
        return self._said.decode(errors="replace")

    def wait_for(self, text: str) -> None:
        """Waits until it has said this."""
        with self._changed:
            found = self._changed.wait_for(lambda: text in self.said or not self._is_read, WAIT_S)
        assert found and text in self.said, self.said

    def type(self, keys: bytes) -> None:
        """Types on its terminal."""
        os.write(self._ours, keys)

    def hang_up(self) -> None:
        """Closes the terminal, or the pipe that it writes to."""
        os.close(self._wake)
        self._reader.join()  # a descriptor that is being read stays open
        os.close(self._ours)
        os.close(self._woken)
        self._ours = -1

    def wait(self) -> int:
        """Waits for its end. Returns the exit code."""
        return self.process.wait(WAIT_S)

    def living(self) -> dict[int, str]:
        """Command lines of all processes that it has started, itself included, by their numbers."""
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                is_marked = f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                if is_marked or str(self._data_dir) in command:
                    found[int(entry.name)] = command
        return found

    def clean_up(self) -> None:
        """Kills whatever is left."""
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.process.wait(WAIT_S)
        if self._ours >= 0:
            self.hang_up()

    def _read(self) -> None:
        while self._is_read:
            readable, _, _ = select.select([self._ours, self._woken], [], [])
            data = b""
            if self._woken not in readable:
                with suppress(OSError):  # nobody has the terminal open any more
                    data = os.read(self._ours, 65536)
            with self._changed:
                self._said += data
                self._is_read = bool(data)
                self._changed.notify_all()


def child_commands(pid: int) -> dict[int, list[str]]:
    """Command lines of the children that a process has; threads and children may end meanwhile, and then count not."""
    commands = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text().split():
                with suppress(FileNotFoundError, ProcessLookupError):
                    if line := Path(f"/proc/{child}/cmdline").read_bytes():
                        commands[int(child)] = line.decode().split("\0")
    return commands


def runs(pid: int) -> bool:
    """True if a process runs. One that has ended may stay until its parent notices, but has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False
