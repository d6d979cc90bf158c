"""Threads of the kernels: each unit runs once, on the first free thread, and no thread spins for long."""

import os
import subprocess
from pathlib import Path

import pytest

from kernels.native.compiling import SOURCES

STRESS = Path(__file__).with_name("team_stress.cpp")


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("team") / "stress"
    flags = ["-O2", "-std=c++17", "-pthread", "-I", str(SOURCES)]
    compiler = os.environ.get("CXX") or "g++"
    subprocess.run([compiler, *flags, str(STRESS), str(SOURCES / "team.cpp"), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("num_cores", [None, 1])
def test_every_unit_is_done_once_from_any_caller_and_who_is_idle_sleeps(stress: Path, num_cores: int | None) -> None:
    arguments = [str(num_cores)] if num_cores else []
    done = subprocess.run([stress, *arguments], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
