"""One supervised service: started, its end seen, started again, ended.

What had been ready is started again at once, however often it is killed; what fails at its start is tried again less
and less often. Its log goes straight to a file, so that it can log even when the supervisor is gone, and is where its
readiness is read from. Knows nothing else of what it runs.
"""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from quire.cli.supervisor.service_log import ServiceLog

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 5.0
READY_S = 1.0  # what was ready for so long did not fail at its start
QUIET_READY_S = 10.0  # the same of what ran for so long, since at a high log level nobody says that he is ready
MAX_FAILED_STARTS = 5
EXIT_CONFIGURATION = 2


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
        *,
        ready_event: str,
    ) -> None:
        """Makes what `supervise` starts.

        Args:
            name: as it is called in messages.
            command: what to run.
            log: file for all that it says.
            inherited_fds: descriptors that it keeps.
            on_restart: told each time why it is started again.
            ready_event: what it logs once it can do its work.
        """
        self.name = name
        self.log = ServiceLog(log)
        self._command = command
        self._inherited_fds = inherited_fds
        self._on_restart = on_restart
        self._ready_event = ready_event
        self._process: asyncio.subprocess.Process | None = None
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
            if self._was_ready() or loop.time() - started_s > QUIET_READY_S:
                backoff_s, num_failures = FIRST_BACKOFF_S, 0
            num_failures += 1
            if not was_ready():
                self._check_start(code, num_failures)
            self._on_restart(f"{self.name} {_described(code)}; starting it again in {backoff_s:g} s ({self.log.path})")
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

    def has_said(self, event: str) -> bool:
        """Whether it has logged the event since its last start; at a high log level it says little."""
        return self.log.path.exists() and self.log.first_time_of(event) is not None

    def kill(self) -> None:
        """SIGKILL, for who cannot wait."""
        self._is_ending = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _run_once(self) -> int:
        with self.log.begin() as log:
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

    def _was_ready(self) -> bool:
        since = self.log.first_time_of(self._ready_event)
        return since is not None and (datetime.now(UTC) - since).total_seconds() > READY_S

    def _check_start(self, code: int, num_failures: int) -> None:
        if code == EXIT_CONFIGURATION:
            raise StartFailedError(self.log.last_line(), EXIT_CONFIGURATION)
        if num_failures >= MAX_FAILED_STARTS:
            message = f"{self.name} {_described(code)} {num_failures} times: {self.log.last_line()} ({self.log.path})"
            raise StartFailedError(message, 1)


def module_command(module: str, *arguments: str) -> list[str]:
    """Runs a module of ours; -P, so that a folder of the same name where the user stands is not taken for it."""
    return [sys.executable, "-P", "-m", module, *arguments]


def _described(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
