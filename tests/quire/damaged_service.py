"""A damaged model folder given to the real `quire serve`: what must not be in how it ends."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.patience import patient
from tests.services import ROOT, free_address

END_S = 10.0  # on an idle machine, where it takes half a second
_PROGRESS = (" checking", "; logs in ")  # ends of lines, or parts of them, that say only how far it is


def faults_of_serving(folder: Path) -> list[str]:
    """List the faults of `quire serve`: none if it ended within seconds with one line of its own and exit code 2."""
    with tempfile.TemporaryDirectory(prefix="quire-data-") as data_dir:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "quire.cli", "serve", str(folder), "--listen", free_address()),
                *("--data-dir", data_dir, "--device", "cpu", "--num-blocks", "16", "--threads", "1", "--gateways", "0"),
            ],
            cwd=ROOT, env={**os.environ, "COLUMNS": "500"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=patient(END_S))
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends what it has started
            process.communicate()
            return [f"no end within {patient(END_S):.0f} s"]
        logs = "".join(each.read_text(errors="replace") for each in Path(data_dir).rglob("*.log"))
    lines = [line for line in said.splitlines() if not line.endswith(_PROGRESS[0]) and _PROGRESS[1] not in line]
    faults = [] if process.returncode == 2 else [f"exit code {process.returncode}"]
    if len(lines) != 1 or not lines[0].startswith("quire: "):
        faults.append(f"{len(lines)} lines: {lines[-2:]}")
    if "Traceback" in said + logs:
        faults.append("a traceback")
    return faults
