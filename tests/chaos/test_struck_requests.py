"""Proofs that a fault struck requests: what a victim ran before, and what a new scheduler found in the journal."""

import json
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import quire
from tests.chaos.deployment import Place
from tests.chaos.supervisor_faults import SCENARIOS, num_recovered


class ScriptedPlace(Place):
    """Place whose workers run so many requests, from one look to the next; None: no scheduler answers."""

    def __init__(self, *looks: dict[str, int] | None) -> None:
        super().__init__("nowhere")
        self._looks = list(looks)

    def client(self) -> Any:
        @asynccontextmanager
        async def opened() -> Any:
            yield SimpleNamespace(stats=self._stats)

        return opened()

    async def _stats(self) -> Any:
        look = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        if look is None:
            raise quire.UnavailableError("nobody leads")
        workers = [SimpleNamespace(worker_id=name, num_running=number) for name, number in look.items()]
        return SimpleNamespace(workers=workers)


async def test_a_victim_is_waited_for_until_it_has_requests() -> None:
    place = ScriptedPlace({"worker-0": 0, "worker-1": 7}, None, {"worker-1": 7}, {"worker-0": 3, "worker-1": 7})
    assert await place.until_busy("worker-0") == ("worker-0", 3)


async def test_the_one_with_most_requests_is_struck() -> None:
    place = ScriptedPlace({"worker-0": 0, "worker-1": 0}, {"worker-0": 3, "worker-1": 7})
    assert await place.until_busy("worker-0", "worker-1") == ("worker-1", 7)


async def test_a_victim_without_requests_breaks_the_scenario_off() -> None:
    with pytest.raises(TimeoutError):
        await ScriptedPlace({"worker-0": 0}).until_busy("worker-0", timeout_s=0.01)


@pytest.mark.parametrize(
    ("lives", "found"), [((), 0), ((0,), 0), ((12,), 0), ((0, 0), 0), ((0, 12), 12), ((0, 12, 9), 9)]
)
def test_what_a_later_scheduler_found_in_the_journal_is_counted(
    tmp_path: Path, lives: Sequence[int], found: int
) -> None:
    lines = ["no object", *(json.dumps({"event": "journal read", "num_live": number}) for number in lives), "{cut off"]
    (tmp_path / "scheduler.log").write_text("\n".join(lines))
    assert num_recovered(tmp_path) == found


def test_a_new_start_that_finds_no_request_misses_a_target() -> None:
    assert "nothing_recovered" in {target.figure for scenario in SCENARIOS for target in scenario.targets}
