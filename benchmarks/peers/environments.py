"""Virtual environments of peers: made once under a cache folder, from pinned versions, and found again.

Knows pip; not what is done in an environment.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from dataclasses import field as dataclass_field
from pathlib import Path

_DONE_FILE = "recipe.json"
_KEPT_OUTPUT = 2000  # characters, in an error
_INSTALL_LIMIT_S = 3600.0
# Run by the environment's own Python: what a package needs, but for some.
_NEEDS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
name, *left_out = sys.argv[1:]
for line in requires(name) or ():
    need = Requirement(line)
    if need.name not in left_out and (need.marker is None or need.marker.evaluate({"extra": ""})):
        print(line.partition(";")[0].strip())
"""


class SetUpError(Exception):
    """Failure to make an environment; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Pinned requirements. `torch` is installed first, since its builds for CPUs come from an index of their own."""

    torch: str | None = None
    requirements: tuple[str, ...]
    # Packages whose own requirements are installed but for the named ones, which drag in other builds of torch.
    without: Mapping[str, tuple[str, ...]] = dataclass_field(default_factory=dict)
    variables: Mapping[str, str] = dataclass_field(default_factory=dict)  # of the process that builds


def python_of(name: str, recipe: Recipe, folder: Path, install: Callable[[Path, Recipe], None]) -> Path:
    """Python of an environment, which is made if it is missing. Raises SetUpError."""
    place, wanted = folder / name, json.loads(json.dumps(asdict(recipe)))
    python, done = place / "bin" / "python", place / _DONE_FILE
    if done.is_file() and json.loads(done.read_text()) == wanted:
        return python
    shutil.rmtree(place, ignore_errors=True)
    try:
        install(place, recipe)
    except (OSError, subprocess.SubprocessError) as error:
        raise SetUpError(_reason(error)) from error
    done.write_text(json.dumps(wanted))
    return python


def variables_in(variables: Mapping[str, str], python: Path, mark: str) -> dict[str, str]:
    """Variables with the folder of the environment instead of the mark. Raises SetUpError if a library is not there."""
    made = {name: value.replace(mark, str(python.parent.parent)) for name, value in variables.items()}
    library = made.get("LD_PRELOAD")
    if library is not None and not Path(library).is_file():  # the loader would warn, and go on without it
        raise SetUpError(f"there is no {library} to preload")
    return made


def our_python() -> Path:
    """Path of this process's Python."""
    return Path(sys.executable)


def install_with_pip(place: Path, recipe: Recipe, torch_index: str | None) -> None:
    """Makes the environment. `torch_index`: where torch comes from; None: pip's own configuration."""
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    if recipe.torch is not None:
        index = ["--index-url", torch_index] if torch_index else []
        _pip(python, recipe, *index, recipe.torch)
    if recipe.requirements:
        _pip(python, recipe, *recipe.requirements)
    for requirement, left_out in recipe.without.items():
        _pip(python, recipe, "--no-deps", requirement)
        command = [str(python), "-c", _NEEDS, requirement.partition("==")[0], *left_out]
        needs = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
        _pip(python, recipe, *filter(None, needs))


def _pip(python: Path, recipe: Recipe, *arguments: str) -> None:
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=_INSTALL_LIMIT_S,
        env={**os.environ, **recipe.variables},
    )


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{error.cmd[-1]}: {str(error.stderr).strip()[-_KEPT_OUTPUT:]}"
    return str(error)
