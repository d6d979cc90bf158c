"""Counts of what an overload holds open: what a server took, not what was begun."""

import socket
from types import SimpleNamespace
from typing import Any

from tests.chaos.overload_faults import SCENARIOS, num_established, num_open
from tests.services import free_address


def test_a_connection_that_nobody_took_is_not_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = socket.create_connection(server.getsockname())
        refused = socket.socket()
        host, _, port = free_address().rpartition(":")
        refused.setblocking(False)
        refused.connect_ex((host, int(port)))
        with taken, refused:
            assert num_established([taken, refused]) == 1


def test_a_call_that_was_refused_is_not_counted_as_idle() -> None:
    calls: list[Any] = [SimpleNamespace(done=lambda is_over=is_over: is_over) for is_over in (False, True, False)]
    assert num_open(calls) == 2


def test_idle_streams_and_exhausted_files_are_held_to_a_target() -> None:
    [scenario] = [each for each in SCENARIOS if each.fault == "F33"]
    assert {"streams_not_open", "files_never_full"} <= {target.figure for target in scenario.targets}
