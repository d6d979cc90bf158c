"""Fixtures that several parts use; time limits that suit the machine; and Ctrl-C for those that are told to interrupt.

A shell that starts something in its background lets it ignore SIGINT, and whatever it starts inherits that.
"""

import signal

import pytest

from tests.patience import patient
from tests.valkey import valkey

__all__ = ["valkey"]

signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives each test the time that its own limit, or everyone's, means on this machine now."""
    given = config.getoption("timeout")
    everyones_s = float(config.getini("timeout") if given is None else given)
    for item in items:
        marker = item.get_closest_marker("timeout")
        own_s = everyones_s if marker is None else float(marker.args[0])
        if everyones_s and own_s:  # 0: no test has a limit
            item.add_marker(pytest.mark.timeout(patient(own_s)), append=False)
