"""One mutant after another in a copy of the project: the related tests run, and the first that fails has found it."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.mutants.operators import Mutant
from tests.project_files import project_files

# unconfirmed: the test that failed fails without the fault, too.
Status = Literal["found", "timed out", "survived", "unconfirmed"]

# A fault often makes a test wait for ever: it fails after a minute of an idle machine.
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=60")
NO_TESTS = 5  # pytest's exit code
USAGE = 4
# Ids may have spaces; a captured log's line begins with a padded level.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of one mutant. A mutant whose tests never end counts as found."""

    mutant: Mutant
    status: Status
    found_by: str  # the test; empty if none did
    seconds: float


@dataclass(frozen=True, slots=True)
class TestRun:
    """Run of tests; without a code it was killed at its time limit."""

    __test__ = False

    code: int | None
    output: str
    seconds: float


class Sandbox:
    """A copy of the files of a project, which is changed instead of it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder
        for name in project_files(root):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, folder / name)

    def run_tests(self, paths: Sequence[str], limit_s: float) -> TestRun:
        """Runs tests until one fails, or their time is over; nothing that they started goes on."""
        command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", *OPTIONS, *paths]
        began_s = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.root)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            code, output = None, ""
        finally:
            _end_group(process)
        return TestRun(code, output, time.monotonic() - began_s)

    def try_mutant(self, mutant: Mutant, tests: Sequence[str], limit_s: float, num_near: int = 0) -> Outcome:
        """Run the tests with the fault, undo it, and check that the failed test passes without it.

        The first `num_near` files run alone before all others: collecting so many takes longer than most tests.
        """
        file = self.root / mutant.path
        source = file.read_text()
        file.write_text(mutant.applied_to(source))
        try:
            run = self.run_tests(tests[:num_near], limit_s) if num_near else None
            if run is None or run.code == 0:
                run = self.run_tests(tests[num_near:], limit_s)
        finally:
            file.write_text(source)
        if run.code in (NO_TESTS, USAGE):
            raise RuntimeError(f"the tests of {mutant.path} cannot be run:\n{run.output[-2000:]}")
        status: Status = "timed out" if run.code is None else "survived" if run.code == 0 else "found"
        failed = _FAILED.search(run.output)
        by = failed[1] if status == "found" and failed else ""
        if status == "found" and self.run_tests([by] if by else tests, limit_s).code != 0:
            status = "unconfirmed"
        return Outcome(mutant=mutant, status=status, found_by=by, seconds=round(run.seconds, 1))


def _end_group(process: "subprocess.Popen[str]") -> None:
    """Kills what is left of the process and of all that it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
