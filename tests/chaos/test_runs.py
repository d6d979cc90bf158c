"""Results of several runs in one file."""

import json
from pathlib import Path
from typing import Any

from tests.chaos.runs import taken_over


def row(fault: str, commit: str, seconds: float | None = None) -> dict[str, Any]:
    more = {} if seconds is None else {"seconds": seconds}
    return {"fault": fault, "title": f"{fault} happens", "commit": commit, "more": more}


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
