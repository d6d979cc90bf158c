"""Lines of a service's start for the supervisor: what each report becomes, and that nothing waits for its reader."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from common.status import Status

PIPE_BYTES = 4096  # that a pipe takes whole or not at all


class Pipe:
    """A pipe, and the service's side of it."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self.reader, self.writer = os.fdopen(reader, "rb"), os.fdopen(writer, "wb")
        self.status = Status(writer)

    def said(self) -> list[dict[str, Any]]:
        """Close the service's side and return all of its lines."""
        self.writer.close()
        return [json.loads(line) for line in self.reader]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    with made.reader, made.writer:
        yield made


def test_phases_have_the_part_that_is_done_where_it_is_known(pipe: Pipe) -> None:
    pipe.status.phase("loading")
    pipe.status.phase("compiling", 1 / 3)
    assert pipe.said() == [{"phase": "loading"}, {"phase": "compiling", "part": 0.333}]


def test_of_the_log_warnings_go_with_their_reasons_and_events_of_the_start_whatever_their_level(pipe: Pipe) -> None:
    for level, event, fields in (
        ("info", "a request ended", {"reason": "length"}),
        ("info", "ready", {"reason": "not said"}),
        ("warning", "slow path", {"reason": OSError("no compiler")}),
        ("error", "it failed", {}),
        ("critical", "it ends", {"reason": ""}),
    ):
        pipe.status.forward_log_entry({"event": event, "level": level, **fields})
    assert pipe.said() == [
        {"event": "ready"},
        {"warning": "slow path", "reason": "no compiler"},
        {"warning": "it failed"},
        {"warning": "it ends", "reason": ""},
    ]


def test_a_line_longer_than_a_pipe_takes_whole_is_shortened(pipe: Pipe) -> None:
    pipe.status.notice("dtype", "x" * PIPE_BYTES)
    pipe.status.notice("dtype", "short")
    first, second = pipe.said()
    assert first == {"about": "dtype", "notice": "x" * 500}
    assert second == {"about": "dtype", "notice": "short"}


def test_nothing_waits_for_a_reader_that_does_not_read_and_lines_stay_whole(pipe: Pipe) -> None:
    for number in range(10_000):  # more than any pipe holds
        pipe.status.phase(f"phase {number}")
    said = pipe.said()
    assert said == [{"phase": f"phase {number}"} for number in range(len(said))] and len(said) < 10_000


def test_nothing_fails_without_a_reader(pipe: Pipe) -> None:
    pipe.reader.close()
    pipe.status.phase("loading")
    Status().phase("loading")
