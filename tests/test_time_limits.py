"""A test that exceeds its time fails alone, and has as much time as the machine needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient, slowness

ROOT = Path(__file__).resolve().parent.parent

TOO_LONG = {
    "sleeps": "time.sleep(600)",
    "computes": "while True: pass",
    "waits for a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "waits in its event loop": "asyncio.run(asyncio.sleep(600))",
    "is in a task that goes on whatever is raised": "asyncio.run(goes_on())",
}

SOURCE = """
import asyncio, threading, time

async def compute() -> None:
    time.sleep(600)

async def goes_on() -> None:
    task = asyncio.create_task(compute())
    while not task.done():
        await asyncio.sleep(0)
    task.exception()
    await asyncio.sleep(600)

def test_first() -> None:
    {statement}

def test_second() -> None:
    pass
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a folder with the settings of this project."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder)]
    return subprocess.run(
        [*command, "-p", "tests.time_limit", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "QUIRE_TEST_SLOWNESS": "1"},
        capture_output=True,
        text=True,
        timeout=patient(100),
        check=False,
    )


@pytest.mark.parametrize("statement", TOO_LONG.values(), ids=TOO_LONG.keys())
def test_a_test_that_exceeds_its_time_fails_alone(tmp_path: Path, statement: str) -> None:
    (tmp_path / "test_both.py").write_text(SOURCE.format(statement=statement))
    ended = run_pytest(tmp_path, "--timeout", "1")
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "Timeout (>1.0s)" in ended.stdout


STUCK = """
import threading, time
import pytest

@pytest.fixture
def stuck():
    lock = threading.Lock()
    lock.acquire()
    yield
    lock.acquire()

def test_first(stuck) -> None:
    {statement}

def test_second() -> None:
    pass
"""


@pytest.mark.parametrize("statement", ["time.sleep(600)", "raise AssertionError", "pass"])
def test_clearing_away_that_waits_for_ever_ends_too(tmp_path: Path, statement: str) -> None:
    (tmp_path / "test_both.py").write_text(STUCK.format(statement=statement))
    ended = run_pytest(tmp_path, "--timeout", "1")
    failed = "" if statement == "pass" else "1 failed, "
    passed = 2 if statement == "pass" else 1
    assert f"{failed}{passed} passed, 1 error" in ended.stdout, ended.stdout + ended.stderr


def test_each_test_has_the_time_that_its_limit_means_on_this_machine(request: pytest.FixtureRequest) -> None:
    everyones_s = float(request.config.getoption("timeout") or request.config.getini("timeout"))
    marker = request.node.get_closest_marker("timeout")
    if everyones_s:
        assert marker is not None and marker.args == (everyones_s * slowness(),)
    else:
        assert marker is None


def test_slowness_can_be_said_and_never_shortens_a_limit() -> None:
    for said, factor in (("7.5", 7.5), ("0.1", 1.0)):
        code = "from tests.patience import patient; print(patient(2.0))"
        environment = {"QUIRE_TEST_SLOWNESS": said, "PATH": ""}
        ended = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        assert float(ended.stdout) == 2.0 * factor


SLOW_REPORT = """
import time
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call):
    if call.excinfo is not None:
        time.sleep(3)
    return (yield)
"""


def test_a_report_that_takes_long_is_not_ended_by_the_timer_of_its_test(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(SLOW_REPORT)
    (tmp_path / "test_both.py").write_text(SOURCE.format(statement="raise AssertionError"))
    ended = run_pytest(tmp_path, "--timeout", "1")
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr
