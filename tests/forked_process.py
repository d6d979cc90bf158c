"""Process of a service, forked from one that has imported everything, with the interface of `subprocess.Popen`.

Its imports, of torch above all, take longer than most tests with real services. Arguments, log and exit code are those
of `python -m`. It does not know what a service says.
"""

import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock

from common.process import end_after

PRELOADED = ["worker_svc.__main__", "worker_svc.process", "scheduler_svc.__main__"]

_FORKS = multiprocessing.get_context("forkserver")
# An end is read once, by whoever asks first; a start asks after the ends of all others.
_LOCK = Lock()


class ForkedProcess:
    """Runs `module`'s `main` in a folder; the fork has the environment that the first one found."""

    def __init__(self, module: str, arguments: Sequence[str], cwd: Path) -> None:
        self.args = [module, *arguments]
        _FORKS.set_forkserver_preload(PRELOADED)
        reader, writer = _FORKS.Pipe(duplex=False)
        self._process = _FORKS.Process(target=_main, args=(module, arguments, cwd, writer), daemon=True)
        with _LOCK:
            self._process.start()
        writer.close()
        self.stderr = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        with _LOCK:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send it to a process that runs; nothing happens to one that has ended, even if that is not known yet."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _main(module: str, arguments: Sequence[str], cwd: Path, log: Connection) -> None:
    gc.freeze()  # what was imported is not looked through again, as if it had been compiled in
    os.chdir(cwd)
    os.dup2(log.fileno(), sys.stderr.fileno())
    sys.argv = [module, *arguments]
    if hasattr(importlib.import_module(module), "__path__"):
        module += ".__main__"
    end_after(importlib.import_module(module).main)
