"""Tests of stalling processes: the command below it, too, and none stands still when all is over."""

import os
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.stalled_processes import TICK_S, Staller, run_stalled

ALWAYS = 1 / TICK_S


@pytest.fixture
def sleeping() -> Iterator[psutil.Popen]:
    """A child that sleeps."""
    process = psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    if process.returncode is None:
        process.kill()
        process.wait()


def wait_until_stopped(process: psutil.Popen) -> None:
    """Wait until a child stands still; it stays stopped."""
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def test_a_command_ends_with_its_own_status_however_often_it_is_stalled() -> None:
    staller = Staller(1, rate=ALWAYS, stall_s=(0.01, 0.05))
    assert run_stalled(["sh", "-c", "sleep 0.2; sleep 0.2; exit 3"], staller) == 3
    assert staller.num_stalls > 1


def test_a_process_stands_still_until_its_time_is_over(sleeping: psutil.Popen) -> None:
    staller = Staller(1, rate=ALWAYS, stall_s=(2.0, 2.0))
    staller.tick([sleeping], now_s=10.0)
    wait_until_stopped(sleeping)
    staller.tick([sleeping], now_s=11.9)
    assert (staller.num_stalls, sleeping.status()) == (1, psutil.STATUS_STOPPED)
    staller.tick([], now_s=12.0)
    os.waitid(os.P_PID, sleeping.pid, os.WCONTINUED)


@pytest.mark.parametrize("ends_first", [False, True])
def test_none_stands_still_afterwards(sleeping: psutil.Popen, ends_first: bool) -> None:
    staller = Staller(1, rate=ALWAYS, stall_s=(100.0, 100.0))
    staller.tick([sleeping], now_s=0.0)
    wait_until_stopped(sleeping)
    if ends_first:
        sleeping.kill()
        sleeping.wait()
    staller.close()
    if not ends_first:
        os.waitid(os.P_PID, sleeping.pid, os.WCONTINUED)


def test_a_process_that_others_stopped_is_left_alone(sleeping: psutil.Popen) -> None:
    staller = Staller(1, rate=ALWAYS, stall_s=(1.0, 1.0))
    sleeping.suspend()
    wait_until_stopped(sleeping)
    staller.tick([sleeping], now_s=0.0)
    staller.close()
    assert (staller.num_stalls, sleeping.status()) == (0, psutil.STATUS_STOPPED)
