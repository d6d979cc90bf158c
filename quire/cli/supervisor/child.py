"""One supervised service: starts it, watches it, restarts it, and ends it with all its processes.

A service that was ready is restarted at once, however often it is killed. One that fails at its start is retried with
growing delays, and not at all if it refuses its configuration. Its log goes straight to a file, so that it can log
without the supervisor; it reports its start on a pipe. Knows nothing else of the service.
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

from quire.cli.supervisor.service_log import MOST_BYTES, ServiceLog
from quire.cli.supervisor.status_pipe import StatusPipe
from quire.exit_code import EXIT_CONFIGURATION

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 5.0
READY_S = 1.0  # a service that was ready for this long did not fail at its start
MAX_FAILED_STARTS = 5
KILLED_S = 5.0  # after this a killed process is gone, unless the kernel holds it


class StartFailedError(Exception):
    """A service does not start, and a retry will not help. The message is the service's own reason."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Child:
    """A service under supervision, in a process group of its own, so that Ctrl-C reaches only the supervisor."""

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
        log_max_bytes: int = MOST_BYTES,
    ) -> None:
        """Describe the service that `supervise` starts.

        Args:
            name: its name in messages.
            command: the command to run; flags for the log file and the status pipe are added.
            log: file for all of its output.
            inherited_fds: descriptors that it inherits.
            on_restart: receives the reason of each restart.
            ready_event: the event that it reports once it can work.
            on_status: receives each of its reports, and {"started": True} at each start.
            environment: its variables; None: the supervisor's.
            log_max_bytes: size at which a start rotates the log.
        """
        self.name = name
        self.log = ServiceLog(log, log_max_bytes)
        self._command = command
        self._inherited_fds = inherited_fds
        self._on_restart = on_restart
        self._on_status = on_status
        self._ready_event = ready_event
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._is_ending = False
        self._events: dict[str, float] = {}  # times of the events that it has reported since its last start
        self._has_been_ready = False

    async def supervise(self, was_ready: Callable[[], bool]) -> None:
        """Keep the service running until `end`.

        Args:
            was_ready: returns True once the deployment has worked; until then a failure to start is raised.

        Raises:
            StartFailedError: the service refused its configuration before it was ever ready, or failed again and again
                before the deployment worked.
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
            reason = f": {self.log.last_line()}" if ending == EXIT_CONFIGURATION else ""
            self._on_restart(
                f"{self.name} {_described(ending)}{reason}; starting it again in {backoff_s:g} s ({self.log.path})"
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def end(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL to what is left after `timeout_s`. Never raises for a process that is gone."""
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

    def has_reported(self, event: str) -> bool:
        """True if the service has reported the event since its last start."""
        return event in self._events

    def kill(self) -> None:
        """Send SIGKILL to the service and to all processes that it started, without waiting."""
        self._is_ending = True
        if self._process is not None and self._process.returncode is None:
            _kill_group(self._process.pid)

    async def _run_once(self) -> int | OSError:
        """Start the service and wait for its end: its exit code, or the error that kept it from starting."""
        self._events.clear()
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
        self._tell({"started": True})
        reading = asyncio.create_task(status.read(self._tell))
        try:
            if self._is_ending:  # `end` was called during the start
                process.terminate()
            return await process.wait()
        finally:
            _kill_group(process.pid)  # processes that it had started, such as a compiler
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
    """The command that runs a module of ours; -P keeps a folder of that name in the working directory out."""
    return [sys.executable, "-P", "-m", module, *arguments]


def _kill_group(pid: int) -> None:
    """Kills the remaining processes of a group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _described(ending: int | OSError) -> str:
    if isinstance(ending, OSError):
        return f"cannot be started: {ending}"
    return f"ended with exit code {ending}" if ending >= 0 else f"was killed by signal {-ending}"
