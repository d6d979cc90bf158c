"""One supervised service: started, its end seen, started again, ended with everything that it had started.

What had been ready is started again at once, however often it is killed; what fails at its start is tried again less
and less often, and not at all if it refuses its configuration. Its log goes straight to a file, so that it can log
even when the supervisor is gone; how far its start is, it tells on a pipe. Knows nothing else of what it runs.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.cli.supervisor.service_log import ServiceLog
from quire.cli.supervisor.status_pipe import StatusPipe
from quire.exit_code import EXIT_CONFIGURATION

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 5.0
READY_S = 1.0  # what was ready for so long did not fail at its start
MAX_FAILED_STARTS = 5
KILLED_S = 5.0  # by then what was killed is gone, unless the kernel holds it


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
        on_status: Callable[[dict[str, Any]], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Makes what `supervise` starts.

        Args:
            name: as it is called in messages.
            command: what to run; it is also told its log file and the pipe for its status.
            log: file for all that it says.
            inherited_fds: descriptors that it keeps.
            on_restart: told each time why it is started again.
            ready_event: what it tells once it can do its work.
            on_status: told all that it tells, and {"started": True} at each start.
            environment: its variables, where they are not ours.
        """
        self.name = name
        self.log = ServiceLog(log)
        self._command = command
        self._inherited_fds = inherited_fds
        self._on_restart = on_restart
        self._on_status = on_status
        self._ready_event = ready_event
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._is_ending = False
        self._events: dict[str, float] = {}  # what it has told since its last start, and when
        self._has_been_ready = False

    async def supervise(self, was_ready: Callable[[], bool]) -> None:
        """Keeps it running until `end`.

        Args:
            was_ready: whether the whole has ever worked; until then a failure to start is raised.

        Raises:
            StartFailedError: it refused its configuration before it was ever ready, or failed again and again before
                anything worked.
        """
        backoff_s, num_failures = FIRST_BACKOFF_S, 0
        while not self._is_ending:
            ending = await self._run_once()
            if self._is_ending:
                return
            if self._was_ready():
                backoff_s, num_failures = FIRST_BACKOFF_S, 0
            num_failures += 1
            self._check_start(ending, num_failures, was_ready())
            self._on_restart(
                f"{self.name} {_described(ending)}; starting it again in {backoff_s:g} s ({self.log.path})"
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def end(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL to what is still there after `timeout_s`. Never raises for a process that is gone."""
        self._is_ending = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        for wait_s in (timeout_s, KILLED_S):
            try:
                async with asyncio.timeout(wait_s):
                    await process.wait()
                    return
            except TimeoutError:
                self.kill()

    def has_said(self, event: str) -> bool:
        """Whether it has told the event since its last start."""
        return event in self._events

    def kill(self) -> None:
        """SIGKILL to it and to all that it has started, for who cannot wait."""
        self._is_ending = True
        if self._process is not None and self._process.returncode is None:
            _kill_group(self._process.pid)

    async def _run_once(self) -> int | OSError:
        """Starts it and waits for its end: its exit code, or why it could not be started."""
        try:
            status = StatusPipe()
        except OSError as error:
            return error
        try:
            with self.log.begin() as log:
                self._process = process = await asyncio.create_subprocess_exec(
                    *(*self._command, f"--log-file={self.log.path}", f"--status-fd={status.theirs}"),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(*self._inherited_fds, status.theirs),
                    process_group=0,
                    env=self._environment,
                )
        except OSError as error:
            status.close()
            return error
        self._events.clear()
        self._tell({"started": True})
        reading = asyncio.create_task(status.read(self._tell))
        try:
            if self._is_ending:  # told to end while it was being started
                process.terminate()
            return await process.wait()
        finally:
            _kill_group(process.pid)  # what it had started, such as a compiler
            await status.end(reading)

    def _tell(self, said: dict[str, Any]) -> None:
        event = said.get("event")
        if isinstance(event, str):
            self._events[event] = asyncio.get_running_loop().time()
            self._has_been_ready |= event == self._ready_event
        if self._on_status is not None:
            self._on_status(said)

    def _was_ready(self) -> bool:
        since_s = self._events.get(self._ready_event)
        return since_s is not None and asyncio.get_running_loop().time() - since_s > READY_S

    def _check_start(self, ending: int | OSError, num_failures: int, was_ready: bool) -> None:
        if ending == EXIT_CONFIGURATION and not self._has_been_ready:
            raise StartFailedError(self.log.last_line(), EXIT_CONFIGURATION)
        if num_failures >= MAX_FAILED_STARTS and not was_ready:
            said = "" if isinstance(ending, OSError) else f": {self.log.last_line()} ({self.log.path})"
            raise StartFailedError(f"{self.name} {_described(ending)} {num_failures} times{said}", 1)


def module_command(module: str, *arguments: str) -> list[str]:
    """Runs a module of ours; -P, so that a folder of the same name where the user stands is not taken for it."""
    return [sys.executable, "-P", "-m", module, *arguments]


def _kill_group(pid: int) -> None:
    """Ends what is left of a process group, if anything is."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _described(ending: int | OSError) -> str:
    if isinstance(ending, OSError):
        return f"cannot be started: {ending}"
    return f"ended with exit code {ending}" if ending >= 0 else f"was killed by signal {-ending}"
