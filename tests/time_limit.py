"""Pytest hooks of the tests' time limits: as long as the machine needs, and told again to a test that goes on.

The plug-in raises once, by a signal, wherever the test is. That may be inside a task of the service under test, which
takes any error for its own and goes on; so the signal comes again, with time for a test that ends to clear away. It
ends its timer with a test that fails; what is cleared away after that has a timer of its own.
"""

import signal
from collections.abc import Generator
from typing import Any

import pytest

from tests.patience import present_slowness, slowness

AGAIN_AFTER_S = 30.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives each test the time that its own limit, or everyone's, means on this machine."""
    given = config.getoption("timeout")
    everyones_s = float(config.getini("timeout") if given is None else given)
    for item in items:
        marker = item.get_closest_marker("timeout")
        own_s = everyones_s if marker is None else float(marker.args[0])
        if everyones_s and own_s:  # 0: no test has a limit
            item.add_marker(pytest.mark.timeout(own_s * slowness()), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, bool, bool]:
    """Lets the timer that the plug-in has set go off again and again, and later if the machine is slower by now."""
    is_set = yield
    if settings.method == "signal":
        _start_timer(settings.timeout)
    return is_set


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Stops the timer of a test that has failed: a report that takes long must not be what it ends."""
    if call.excinfo is not None:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Ends clearing away that waits for ever, such as for a thread of the service that a failed test has broken."""
    marker = item.get_closest_marker("timeout")
    if marker is None or not marker.args[0] or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    before = signal.signal(signal.SIGALRM, _fail_to_clear_away)
    _start_timer(marker.args[0])
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _start_timer(limit_s: float) -> None:
    """Starts the timer of a limit that was given when the tests were collected."""
    now_s = limit_s * present_slowness() / slowness()
    signal.setitimer(signal.ITIMER_REAL, now_s, min(now_s, AGAIN_AFTER_S))


def _fail_to_clear_away(*_: object) -> None:
    pytest.fail("what the test used could not be cleared away in time")
