"""A runner as we see it: a process in its own environment that loads a model, runs loads, and ends with its children.

Knows the protocol, not the peers.
"""

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from benchmarks.report import ROOT

_END_S = 60.0
_KEPT_OUTPUT = 3000  # characters of what it printed, in an error


class PeerError(Exception):
    """Failure of a peer; the text says why."""


class PeerProcess:
    """Requests go in lines of JSON, one at a time; each is answered by a line."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-peer-")
        self._printed = Path(self._folder.name) / "stderr"
        with self._printed.open("w") as printed:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                start_new_session=True,  # so that its children end with it
            )
        self._unread = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a message and return the answer. Raises PeerError if it fails, ends, or takes longer than `limit_s`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._with_output("it has ended")) from None
        answer: dict[str, Any] = json.loads(self._line(limit_s))
        if "error" in answer:
            raise PeerError(self._with_output(answer["error"]))
        return answer

    def peak_memory_bytes(self) -> int:
        """Peak memory of the process and its children: the sum of their peaks; shared memory counts once."""
        return _peak_memory_bytes(self.pid)

    def close(self) -> None:
        """Ends it in peace, and by force what is left of its process group."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        finally:
            self._kill_group()
            self._process.wait()
            self._process.stdout.close()
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        give_up_s = time.monotonic() + limit_s
        while b"\n" not in self._unread:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                self._kill_group()
                raise PeerError(self._with_output(f"no answer within {limit_s:g} s"))
            part = os.read(self._process.stdout.fileno(), 1 << 20)
            if not part:
                raise PeerError(self._with_output(f"it ended with {self._process.wait()}"))
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _with_output(self, reason: str) -> str:
        printed = self._printed.read_text(errors="replace")[-_KEPT_OUTPUT:]
        return f"{reason}\n{printed}".strip()


def _peak_memory_bytes(pid: int) -> int:
    total = 0
    for each in _tree(pid):
        status, rollup = _fields(each, "status"), _fields(each, "smaps_rollup")
        if "VmHWM" in status and "Pss" in rollup:
            total += status["VmHWM"] - (rollup["Rss"] - rollup["Pss"])
    return total << 10


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))
    except OSError:
        return  # it has ended meanwhile


def _fields(pid: int, name: str) -> dict[str, int]:
    """Lines such as `VmHWM:  1234 kB`, in KiB."""
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split() for line in lines]
    return {words[0].rstrip(":"): int(words[1]) for words in parts if len(words) == 3 and words[2] == "kB"}
