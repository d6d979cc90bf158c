"""A process in which a program of a model's runs, from outside: started, asked, kept, killed when it takes too long.

Messages on its pipes are a length and so many bytes. It knows neither templates nor tokenizers.
"""

import os
import select
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path

from quire.errors import UnavailableError

LENGTH = struct.Struct("<I")


class ProcessEndedError(Exception):
    """The process has ended, or was killed, instead of answering."""


class LimitedProcess:
    """One process. `ask` is called by one thread at a time; after ProcessEndedError it is over."""

    def __init__(self, program: Path, first: bytes, environment: Mapping[str, str] | None = None) -> None:
        """Start it. Raises UnavailableError while the system starts none: files, processes or memory have run out."""
        # Nothing of ours is in its environment but where its packages are, which may be in a user's folder or one of
        # PYTHONPATH; `-P` and `cwd` keep other folders out of its imports.
        places = os.pathsep.join(os.path.abspath(each) for each in sys.path if each)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", str(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PYTHONPATH": places, **(environment or {})},
                bufsize=0,
            )
        except OSError as error:
            raise UnavailableError(f"the scheduler cannot start a process for this now: {error.strerror}") from error
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._unsent = _framed(first)  # goes with the first request, within its time

    def ask(self, request: bytes, *, wall_s: float, most_bytes: int) -> tuple[bytes, bytes]:
        """The first byte of its answer, which says of what kind that is, and the rest of it.

        Raises ProcessEndedError, also for an answer of more than so many bytes or after so long a time.
        """
        until_s = time.monotonic() + wall_s
        data, self._unsent = self._unsent + _framed(request), b""
        self._write(data, until_s)
        (length,) = LENGTH.unpack(self._read(LENGTH.size, until_s))
        if not 1 <= length <= most_bytes:
            self.kill()
            raise ProcessEndedError
        answer = self._read(length, until_s)
        return answer[:1], answer[1:]

    @property
    def is_running(self) -> bool:
        """False once it has ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends it; again is harmless."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with suppress(BrokenPipeError):  # what was not read is lost with it
                    pipe.close()

    def _write(self, data: bytes, until_s: float) -> None:
        """Write to a process that may read nothing: a pipe holds 64 KiB."""
        assert self._process.stdin is not None
        fd = self._process.stdin.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        rest = memoryview(data)
        try:
            while rest:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not poll.poll(left_s * 1000):
                    raise TimeoutError
                with suppress(BlockingIOError):
                    rest = rest[os.write(fd, rest) :]
        except OSError:
            self.kill()
            raise ProcessEndedError from None

    def _read(self, num_bytes: int, until_s: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        data = bytearray()
        while len(data) < num_bytes:
            left_s = until_s - time.monotonic()
            piece = b""
            if left_s > 0 and poll.poll(left_s * 1000):
                piece = os.read(fd, num_bytes - len(data))
            if not piece:
                self.kill()
                raise ProcessEndedError
            data += piece
        return bytes(data)


def _framed(data: bytes) -> bytes:
    """Message as it goes over a pipe."""
    return LENGTH.pack(len(data)) + data


class IdleProcesses:
    """Processes that wait for their next question, at most so many; they are killed with it. Any thread may call it."""

    def __init__(self, most: float = inf) -> None:
        self._most = most
        self._idle: list[LimitedProcess] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _kill_all, self._idle)

    def take(self) -> LimitedProcess | None:
        """A process that waits; None if there is none. One that was ended from outside meanwhile is left out."""
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_running:
                    return process
                process.kill()
        return None

    def put_back(self, process: LimitedProcess) -> None:
        """Keep a process for the next question; kill it if enough are kept."""
        with self._lock:
            if len(self._idle) < self._most:
                self._idle.append(process)
                return
        process.kill()


def _kill_all(processes: list[LimitedProcess]) -> None:
    for process in processes:
        process.kill()
