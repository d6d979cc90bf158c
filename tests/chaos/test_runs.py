"""Results of several runs in one file."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.__main__ import main
from tests.chaos.fault_table import Result, page
from tests.chaos.runs import merged, taken_over
from tests.chaos.scenario import Figures, Target
from tests.chaos.stage import Scenario, Stage


def row(fault: str, commit: str, seconds: float | None = None) -> dict[str, Any]:
    more = {} if seconds is None else {"seconds": seconds}
    return {"fault": fault, "title": f"{fault} happens", "met": True, "commit": commit, "more": more}


def test_another_runs_results_take_the_place_of_all_but_longer_ones(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours.json", tmp_path / "others.json"
    ours.write_text(json.dumps({"rows": [row("C5", "old", 1800.0), row("C1", "old", 120.0), row("F01", "old")]}))
    others.write_text(
        json.dumps({"rows": [row("F02", "new"), row("F01", "new"), row("C5", "new", 120.0), row("C1", "new", 120.0)]})
    )
    found = taken_over(ours, others, "rows")
    assert [(each["fault"], each["commit"]) for each in found] == [
        ("C1", "new"),
        ("C5", "old"),
        ("F01", "new"),
        ("F02", "new"),
    ]


def result(scenario: Scenario, *, seconds: float | None = None) -> Result:
    more: dict[str, float | int] = {} if seconds is None else {"seconds": seconds}
    return Result(scenario, Figures(sent=1, died_by_themselves=0, tracebacks=0, more=more), "", 1.0)


def scenario(fault: str, *, targets: tuple[Target, ...] = ()) -> Scenario:
    return Scenario(
        fault=fault, title=f"{fault} happens", injected="", promise="P1", play=the_fault_passes, targets=targets
    )


async def the_fault_passes(stage: Stage) -> Figures:
    raise NotImplementedError


def test_a_shorter_run_takes_the_place_of_a_longer_one_only_if_it_misses_a_target(tmp_path: Path) -> None:
    file = tmp_path / "ours.json"
    file.write_text(json.dumps({"rows": [row("C5", "old", 1800.0)]}))
    long = scenario("C5")
    [kept] = merged(file, "rows", [result(long, seconds=120.0)], [long], commit="new")
    assert kept["commit"] == "old"
    [as_long] = merged(file, "rows", [result(long, seconds=1800.0)], [long], commit="new")
    assert as_long["commit"] == "new"
    bad = scenario("C5", targets=(Target(figure="sent", at_most=0),))
    [missed] = merged(file, "rows", [result(bad, seconds=120.0)], [bad], commit="new")
    assert missed["commit"] == "new"


def test_the_result_of_a_run_that_broke_off_gives_way(tmp_path: Path) -> None:
    file = tmp_path / "ours.json"
    broken = {key: value for key, value in row("C5", "old").items() if key != "more"}
    file.write_text(json.dumps({"rows": [broken]}))
    long = scenario("C5")
    [found] = merged(file, "rows", [result(long, seconds=120.0)], [long], commit="new")
    assert found["commit"] == "new"


def test_a_result_keeps_the_machine_that_it_was_measured_on(tmp_path: Path) -> None:
    file = tmp_path / "ours.json"
    known = [scenario("F01"), scenario("F02")]
    first = merged(file, "rows", [result(known[0])], known, machine="2 cores of Here")
    file.write_text(json.dumps({"rows": first}))
    both = merged(file, "rows", [result(known[1])], known, machine="64 cores of Elsewhere")
    of_fault = {line.split(" | ")[0].strip("| "): line for line in page(both, []).splitlines() if "| F0" in line}
    assert "2 cores of Here" in of_fault["F01"]
    assert "64 cores of Elsewhere" in of_fault["F02"]


def test_the_machine_of_an_old_result_is_not_guessed(tmp_path: Path) -> None:
    rows = merged(tmp_path / "none", "rows", [result(scenario("F01"))], [])
    [line] = [line for line in page(rows, []).splitlines() if "| F01" in line]
    assert "| not recorded |" in line


@pytest.mark.parametrize("asked", [("--only", "F99"), ("--only", "F01,f02"), ("--campaign", "nothing")])
def test_a_fault_that_is_not_known_is_refused_and_nothing_is_written(
    asked: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("--json", str(tmp_path / "chaos.json"), "--page", str(tmp_path / "page.md"))
    monkeypatch.setattr("sys.argv", ["tests.chaos", *asked, *files])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code
    assert not list(tmp_path.iterdir())
