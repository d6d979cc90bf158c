"""Lives of processes in a scenario: what their logs and their ends say."""

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

from tests.chaos.deployment import Life
from tests.services import Service


def life_that_logged(*lines: dict[str, Any]) -> Life:
    return Life("scheduler-0", cast("Service", SimpleNamespace(lines=list(lines))))


def test_a_line_of_a_clock_that_is_longer_behind_than_the_machine_has_run_is_counted() -> None:
    behind = timedelta(seconds=time.monotonic(), hours=1)
    life = life_that_logged({"event": "worker lost", "timestamp": (datetime.now(UTC) - behind).isoformat()})
    assert len(life.logged("worker lost")) == 1
    assert not life.logged("worker lost", after_s=0.0)
