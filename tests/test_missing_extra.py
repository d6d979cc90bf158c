"""A service whose extra is not installed says which one it needs, in one line; Ctrl-C ends a start silently."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import DEMO_MODEL, ROOT

INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "pydantic_settings":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
"""  # within an import that each service makes


def run_without(package: str, folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and standard error of a service in an environment that lacks the package."""
    return run_behind(f"import sys\nsys.modules[{package!r}] = None\n", folder, *arguments)


def run_behind(code: str, folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and standard error of a service in a process that has run this code first."""
    (folder / "sitecustomize.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("service", "package"),
    [
        ("scheduler", "redis"),
        ("scheduler", "structlog"),
        ("scheduler", "uvloop"),
        ("worker", "pydantic_settings"),
        ("gateway", "starlette"),
        ("gateway", "fastapi"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(service: str, package: str, tmp_path: Path) -> None:
    expected = f"{service}: needs {package}; run pip install '.[{service}]' in a clone of Quire\n"
    assert run_without(package, tmp_path, f"{service}_svc") == (1, expected)


def test_so_is_one_that_is_imported_late(tmp_path: Path) -> None:
    expected = "worker: needs torch; run pip install '.[worker]' in a clone of Quire\n"
    arguments = ("worker_svc", "--model", str(DEMO_MODEL), "--device", "cpu")
    assert run_without("torch", tmp_path, *arguments) == (1, expected)


def test_a_module_of_ours_that_is_missing_has_a_traceback(tmp_path: Path) -> None:
    code, said = run_without("common.log", tmp_path, "scheduler_svc")
    assert code == 1 and said.startswith("Traceback") and "common.log" in said


@pytest.mark.parametrize("service", ["scheduler", "worker", "gateway"])
def test_ctrl_c_while_a_service_loads_ends_it_silently(service: str, tmp_path: Path) -> None:
    assert run_behind(INTERRUPTED, tmp_path, f"{service}_svc") == (-signal.SIGINT, "")
