"""Fixtures that several parts use; time limits that suit the machine; and Ctrl-C for those that are told to interrupt.

Property tests try the same examples in each run, however long one takes: what they find is about the code, never about
the machine.

A shell that starts something in its background lets it ignore SIGINT, and whatever it starts inherits that.
"""

import signal

import structlog
from hypothesis import HealthCheck, settings

from tests.time_limit import (
    pytest_collection_modifyitems,
    pytest_runtest_makereport,
    pytest_runtest_teardown,
    pytest_timeout_set_timer,
)
from tests.valkey import valkey

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_runtest_makereport",
    "pytest_runtest_teardown",
    "pytest_timeout_set_timer",
    "valkey",
]

settings.register_profile(
    "quire", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("quire")

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, whose processes are right to ignore it

# As the services write it. By default a traceback comes with all its variables, for which the event loop stands still.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
        structlog.dev.ConsoleRenderer(colors=False),
    ]
)
