"""The Makefile's virtual environments: with an early Python, where one was not finished, with the newest releases."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import ROOT
from tests.patience import patient

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")

# A Python of this version, whose venv has these programs, which do nothing.
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then
  exec {ours} -c "import sys; sys.version_info = {version}; exec(sys.argv[1])" "$2"
fi
mkdir -p "$3/bin" && cd "$3/bin" && for each in {programs}; do echo '#!/bin/sh' > $each; chmod +x $each; done
"""


def make(folder: Path, version: tuple[int, ...], programs: str) -> "subprocess.CompletedProcess[str]":
    """Make the environment with such a Python, up to its torch."""
    python = folder / "python"
    python.write_text(PYTHON.format(ours=sys.executable, version=version, programs=programs))
    python.chmod(0o755)
    venv = folder / "venv"
    command = ["make", "-C", str(ROOT), f"PYTHON={python}", f"VENV={venv}", f"{venv}/.torch"]
    return run(command)


def run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run make as if not within another one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(60), check=False)


def test_an_early_python_is_refused_by_name_and_leaves_no_environment(tmp_path: Path) -> None:
    """Regression: torch was not found for it, and PYTHON had no effect from then on."""
    made = make(tmp_path, (3, 10, 12), "python pip")
    assert made.returncode != 0
    assert f"needs Python 3.11 or later, and {tmp_path / 'python'} is 3.10: name another with PYTHON=" in made.stderr
    assert not (tmp_path / "venv").exists()
    assert make(tmp_path, (3, 11, 0), "python pip").returncode == 0


def test_an_environment_without_pip_is_made_again(tmp_path: Path) -> None:
    """Regression: Debian's venv leaves such a one where python3-venv is missing, and no later call went on from it."""
    assert make(tmp_path, (3, 11, 0), "python").returncode != 0
    assert make(tmp_path, (3, 11, 0), "python pip").returncode == 0


def test_the_newest_releases_are_installed_into_an_empty_environment() -> None:
    """Regression: a second `make test-newest` tested the releases of the first, which pip takes for good enough."""
    shown = run(["make", "-n", "-C", str(ROOT), "PYTHON=python", "test-newest"]).stdout
    assert "python -m venv --clear .quire/newest\n" in shown
