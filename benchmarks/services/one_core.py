"""Processes of a benchmark on one core each."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Have processes that are started meanwhile run on this core alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
