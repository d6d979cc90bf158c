"""Wheels that the images install, gathered here, so that their build needs no package index.

The folder is git-ignored by a file of its own, and gathered again when the versions change.
"""

import hashlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.compose.engine import ROOT, SmokeError, say

WHEELS = ROOT / "wheels"
_EXTRAS = ("cli", "scheduler", "gateway", "worker")
_BEFORE_3_11_3 = "async-timeout>=4.0.3"  # redis wants it there; the image's Python may be older than this one
_MARK = ".gathered"  # holds the digest of what was gathered, as the last thing written


def gather() -> None:
    """Makes the folder hold what the images need. Raises SmokeError if pip cannot find it."""
    constraints = ROOT / "constraints.txt"
    requirements = _requirements()
    torch_index = os.environ.get("TORCH_INDEX", "")
    text = "\n".join([sys.version, torch_index, *requirements, constraints.read_text()])
    digest = hashlib.sha256(text.encode()).hexdigest()
    mark = WHEELS / _MARK
    if mark.is_file():
        if mark.read_text() == digest:
            return
        _forget()
    say(f"gathering wheels in {WHEELS.relative_to(ROOT)}/")
    WHEELS.mkdir(exist_ok=True)
    (WHEELS / ".gitignore").write_text("*\n")
    _pip_wheel(constraints, "torch", *([f"--index-url={torch_index}"] if torch_index else []))
    _pip_wheel(constraints, *requirements)
    mark.write_text(digest)


def _requirements() -> list[str]:
    """Requirements of the images, and of building the distribution itself."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    extras = project["project"]["optional-dependencies"]
    return [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(requirement for extra in _EXTRAS for requirement in extras[extra]),
        _BEFORE_3_11_3,
    ]


def _pip_wheel(constraints: Path, *arguments: str) -> None:
    options = ["-q", "-c", str(constraints), "-f", str(WHEELS), "-w", str(WHEELS)]
    command = [sys.executable, "-m", "pip", "wheel", *options, *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        raise SmokeError(f"pip wheel exits with {result.returncode}:\n{result.stdout[-4000:]}")


def _forget() -> None:
    """Delete the folder; beside its mark lie only files of an earlier run."""
    for wheel in WHEELS.glob("*.whl"):
        wheel.unlink()
    (WHEELS / _MARK).unlink()
