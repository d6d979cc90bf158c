"""`quire serve` on a model, and the lines that it says. Needs no package besides what services need."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.patience import patient
from tests.services import DEMO_MODEL, free_address

READY_S = 90.0


class Serve:
    """One `quire serve` and the lines it says."""

    def __init__(
        self, data_dir: Path, *arguments: str, model: str = str(DEMO_MODEL), listen: str | None = None
    ) -> None:
        """`listen`: address to serve at; None: a free one."""
        listen = listen or free_address()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "quire.cli", "serve", model, "--listen", listen, "--data-dir", str(data_dir)),
                *("--num-blocks", "200", "--http", free_address(), *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "COLUMNS": "300"},
        )
        self.said: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.said.append(line)
                self._changed.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line that has the pattern."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.said if (match := re.search(pattern, line))), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or not self._reader.is_alive(), patient(READY_S))
        match = found()
        assert match is not None, "".join(self.said)
        return match

    def wait_ready(self) -> str:
        """Wait until it can generate; return its address."""
        return self.wait_for(r"Quire is ready at (\S+)")[1]

    def end(self, number: signal.Signals) -> int:
        """A signal, and the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(patient(60))
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code
