"""Pytest hooks of the tests' time limits: as long as the machine needs, and told again to a test that goes on.

The plug-in raises once, by a signal, wherever the test is. That may be inside a task of the service under test, which
takes any error for its own and goes on; so the signal comes again, with time for a test that ends to clear away.
"""

import signal
from collections.abc import Generator
from typing import Any

import pytest

from tests.patience import patient

AGAIN_AFTER_S = 30.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives each test the time that its own limit, or everyone's, means on this machine now."""
    given = config.getoption("timeout")
    everyones_s = float(config.getini("timeout") if given is None else given)
    for item in items:
        marker = item.get_closest_marker("timeout")
        own_s = everyones_s if marker is None else float(marker.args[0])
        if everyones_s and own_s:  # 0: no test has a limit
            item.add_marker(pytest.mark.timeout(patient(own_s)), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, bool, bool]:
    """Lets the timer that the plug-in has set go off again and again."""
    is_set = yield
    if settings.method == "signal":
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, min(settings.timeout, AGAIN_AFTER_S))
    return is_set
