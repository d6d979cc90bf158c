"""A worker's process, forked from one that has imported everything: for tests of how it refuses to start.

Its import of torch would take most of their time. Arguments, output and exit code are those of `python -m worker_svc`.
"""

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.process import end_after
from tests.patience import patient

MODULE = "worker_svc.__main__"
TIMEOUT_S = 90.0

_FORKS = multiprocessing.get_context("forkserver")


def run_worker(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A worker that is expected to end by itself."""
    _FORKS.set_forkserver_preload([MODULE, "worker_svc.process"])
    with tempfile.TemporaryDirectory(prefix="quire-forked-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = _FORKS.Process(target=_main, args=(arguments, out, err))
        process.start()
        process.join(patient(TIMEOUT_S))
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def _main(arguments: Sequence[str], out: Path, err: Path) -> None:
    for path, fd in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
    sys.argv = [MODULE, *arguments]
    end_after(importlib.import_module(MODULE).main)
