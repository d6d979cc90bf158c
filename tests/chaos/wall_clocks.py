"""Times of day of single processes, which a test sets while they run.

A library of ours (`wall_clock.c`) is compiled with the system's C compiler and preloaded into the process; each process
has a file that says how far its time of day is from the machine's. Monotonic clocks are those of the machine. Knows no
service.
"""

import os
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("wall_clock.c")
_OFFSET = struct.Struct("=q")  # nanoseconds
_HOUR_NS = 3_600_000_000_000


class WallClocks:
    """Factory of clocks, all in one folder."""

    def __init__(self, folder: Path) -> None:
        """Raises RuntimeError without a C compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise RuntimeError("setting a process's clock takes a C compiler: install gcc")
        self._folder = folder
        self._library = folder / "wall_clock.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", str(self._library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)

    def make(self, name: str) -> "WallClock":
        """Make a clock that follows the machine's until it is set. A restarted process may keep it."""
        return WallClock(self._library, self._folder / f"{name}.offset")


class WallClock:
    """The time of day of the processes that were started with `env`."""

    def __init__(self, library: Path, file: Path) -> None:
        self.num_jumps = 0
        self.env = {"LD_PRELOAD": str(library), "CHAOS_WALL_CLOCK": str(file)}
        self._file = file
        self._file.write_bytes(_OFFSET.pack(0))

    def set_ahead(self, hours: float) -> None:
        """Set the clock ahead of the machine's, or behind it, from now on."""
        self.num_jumps += 1
        with self._file.open("r+b", buffering=0) as file:  # its readers have it mapped
            os.pwrite(file.fileno(), _OFFSET.pack(round(hours * _HOUR_NS)), 0)
