"""Fixtures that several parts use; and Ctrl-C for those that are told to interrupt something.

A shell that starts something in its background lets it ignore SIGINT, and whatever it starts inherits that.
"""

import signal

from tests.valkey import valkey

__all__ = ["valkey"]

signal.signal(signal.SIGINT, signal.default_int_handler)
