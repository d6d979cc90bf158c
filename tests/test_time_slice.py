"""Time slices of threads, and of what they start. Those of services: `tests/quire/test_serve.py`."""

import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from quire.time_slice import restore_slice, shorten_slice, slice_ns

T = TypeVar("T")
SHORT_NS = 100_000
PRINTS_ITS_SLICE = "from quire.time_slice import slice_ns; print(slice_ns())"
KERNEL = tuple(int(each) for each in platform.release().split("-")[0].split(".")[:2])

pytestmark = pytest.mark.skipif(KERNEL < (6, 12), reason="this kernel has no slices of threads")


def in_thread(call: Callable[[], T]) -> T:
    """Result of the call in a new thread, which ends with its slice."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def test_a_short_slice_is_inherited_and_given_back() -> None:
    def shortened() -> tuple[int | None, int | None, int | None, int | None]:
        usual = slice_ns()
        shorten_slice()
        child = subprocess.run([sys.executable, "-c", PRINTS_ITS_SLICE], capture_output=True, check=True)
        short, of_thread = slice_ns(), in_thread(slice_ns)
        restore_slice()
        assert slice_ns() == usual
        return usual, short, of_thread, int(child.stdout)

    before = slice_ns()
    usual, short, of_thread, of_child = in_thread(shortened)
    assert usual == before == slice_ns() and before and before > SHORT_NS
    assert short == of_thread == of_child == SHORT_NS


def test_nice_and_policy_stay() -> None:
    def niced() -> tuple[int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 3)
        shorten_slice()
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)

    def batch() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        before = slice_ns()
        shorten_slice()
        return slice_ns() == before, os.sched_getscheduler(0)

    assert in_thread(niced) == (3, os.SCHED_OTHER)
    assert in_thread(batch) == (True, os.SCHED_BATCH)


def test_a_process_that_is_gone_is_no_error() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    shorten_slice(child.pid)
    assert slice_ns(child.pid) is None
