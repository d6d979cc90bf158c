"""One supervised service: started, its end seen, started again with backoff, ended.

Its log goes straight to a file, so that it can log even when the supervisor is gone. Knows nothing of what it runs.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 5.0
SETTLED_S = 10.0  # what ran longer than this did not fail at its start
MAX_FAILED_STARTS = 5
EXIT_CONFIGURATION = 2
TAIL_BYTES = 8192


class StartFailedError(Exception):
    """A service does not start, and trying again will not help. The message is its own reason."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Child:
    """A service under supervision. Its process is in a group of its own, so that Ctrl-C reaches us alone."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        inherited_fds: Sequence[int],
        on_restart: Callable[[str], None],
    ) -> None:
        self.name = name
        self._command = command
        self._log = log
        self._inherited_fds = inherited_fds
        self._on_restart = on_restart
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self._is_ending = False

    async def supervise(self, was_ready: Callable[[], bool]) -> None:
        """Keeps it running until `end`.

        Args:
            was_ready: whether the whole has ever worked; until then a failure to start is raised.

        Raises:
            StartFailedError: it refused its configuration, or failed again and again, before anything worked.
        """
        loop = asyncio.get_running_loop()
        backoff_s, num_failures = FIRST_BACKOFF_S, 0
        while not self._is_ending:
            started_s = loop.time()
            code = await self._run_once()
            if self._is_ending:
                return
            if loop.time() - started_s > SETTLED_S:
                backoff_s, num_failures = FIRST_BACKOFF_S, 0
            num_failures += 1
            if not was_ready():
                self._check_start(code, num_failures)
            self._on_restart(f"{self.name} {_described(code)}; starting it again in {backoff_s:g} s ({self._log})")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def end(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL to what is still there after `timeout_s`."""
        self._is_ending = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL, for who cannot wait."""
        self._is_ending = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def last_line(self) -> str:
        """What it said last since its start."""
        lines = self.said()
        return lines[-1].strip() if lines else "it said nothing"

    def said(self) -> list[str]:
        """The last lines of its log since its start."""
        with self._log.open("rb") as log:
            end = log.seek(0, 2)
            log.seek(max(self._log_start, end - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()]

    async def _run_once(self) -> int:
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=self._inherited_fds,
                process_group=0,
            )
        if self._is_ending:  # told to end while it was being started
            self._process.terminate()
        return await self._process.wait()

    def _check_start(self, code: int, num_failures: int) -> None:
        if code == EXIT_CONFIGURATION:
            raise StartFailedError(self.last_line(), EXIT_CONFIGURATION)
        if num_failures >= MAX_FAILED_STARTS:
            message = f"{self.name} {_described(code)} {num_failures} times: {self.last_line()} ({self._log})"
            raise StartFailedError(message, 1)


def module_command(module: str, *arguments: str) -> list[str]:
    """Runs a module of ours; -P, so that a folder of the same name where the user stands is not taken for it."""
    return [sys.executable, "-P", "-m", module, *arguments]


def _described(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
