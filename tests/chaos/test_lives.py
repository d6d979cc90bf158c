"""Lives of processes in a scenario: what their logs and their ends say."""

import signal
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.chaos.deployment import TRACEBACK, Deployment, Life
from tests.chaos.fault_table import Result
from tests.chaos.scenario import Figures
from tests.chaos.stage import Scenario, Stage, count_ends
from tests.services import Service


def life_that_logged(*lines: dict[str, Any], code: int | None = None, raw: tuple[str, ...] = ()) -> Life:
    process = SimpleNamespace(poll=lambda: code)
    service = SimpleNamespace(
        lines=list(lines), raw=list(raw), process=process, wait=lambda: code, signal=lambda number: None
    )
    return Life("scheduler-0", cast("Service", service))


async def the_fault_passes(stage: Stage) -> Figures:
    raise NotImplementedError


def missed_with(*lives: Life, is_logged: bool = False) -> set[str]:
    scenario = Scenario(
        fault="F", title="", injected="", promise="", play=the_fault_passes, targets=(), is_logged=is_logged
    )
    figures = Figures()
    count_ends(figures, lives)
    return {target.figure for target in Result(scenario, figures, "", 1.0).missed}


def test_a_line_of_a_clock_that_is_longer_behind_than_the_machine_has_run_is_counted() -> None:
    behind = timedelta(seconds=time.monotonic(), hours=1)
    life = life_that_logged({"event": "worker lost", "timestamp": (datetime.now(UTC) - behind).isoformat()})
    assert len(life.logged("worker lost")) == 1
    assert not life.logged("worker lost", after_s=0.0)


@pytest.mark.parametrize("code", [-signal.SIGSEGV, -signal.SIGKILL, 1, 9])
def test_a_service_that_ends_by_itself_misses_a_target_though_another_has_followed(code: int) -> None:
    lives = [life_that_logged(code=code, raw=("last words",)), life_that_logged()]
    assert missed_with(*lives) == {"died_by_themselves"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_service_that_was_told_to_end_has_not_crashed(number: signal.Signals) -> None:
    life = life_that_logged(code=-number)
    life.send(number)
    assert not life.has_crashed


def test_a_service_that_was_told_to_end_in_order_and_did_not_has_crashed() -> None:
    life = life_that_logged(code=1)
    life.send(signal.SIGTERM)
    assert life.has_crashed


def test_a_leader_that_was_followed_and_a_worker_whose_rank_was_struck_have_not_crashed() -> None:
    assert not life_that_logged(
        {"event": "scheduler ends", "timestamp": datetime.now(UTC).isoformat()}, code=1
    ).has_crashed
    worker = life_that_logged(code=1)
    worker.is_struck_inside = True
    assert not worker.has_crashed


def test_a_traceback_in_any_log_misses_a_target_unless_the_fault_is_logged_with_one() -> None:
    said = life_that_logged(raw=("all is well", f'{{"exception": "{TRACEBACK}"}}'))
    assert missed_with(said) == {"tracebacks"}
    assert missed_with(said, is_logged=True) == set()


def test_the_reason_for_a_traceback_is_its_last_words() -> None:
    plain = (TRACEBACK + ":\n", '  File "/a/path.py", line 1\n', "    fails()\n", "ValueError: no\n")
    assert life_that_logged(raw=plain).first_traceback == "ValueError: no"
    exception = "".join(plain)
    logged = life_that_logged({"event": "step failed", "exception": exception}, raw=(exception,))
    assert logged.first_traceback == "step failed: ValueError: no"
    assert life_that_logged().first_traceback == ""


def test_no_life_is_forgotten_when_another_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.chaos.deployment.Service", FollowedService)
    deployment = Deployment()
    try:
        first, second = deployment.begin_worker("worker-0"), deployment.begin_worker("worker-0")
        assert deployment.lives == [first, second]
    finally:
        deployment.close()


class FollowedService(SimpleNamespace):
    """Service that runs nothing."""

    def __init__(self, module: str, *arguments: str, env: object = None) -> None:
        super().__init__(process=SimpleNamespace(poll=lambda: 0))

    def __enter__(self) -> "FollowedService":
        return self

    def __exit__(self, *ended: object) -> None:
        return None
