"""Result files that keep a history."""

import json
from pathlib import Path
from typing import Any

from benchmarks.result_history import write_with_history


def short(result: dict[str, Any]) -> dict[str, Any]:
    return {"sum": sum(result["parts"].values())}


def test_parts_of_one_commit_stand_beside_each_other(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    write_with_history(output, "some", {}, {"a": 1, "b": 2}, short)
    write_with_history(output, "some", {"unit": "ms"}, {"b": 3}, short)
    result = json.loads(output.read_text())
    assert result["parts"] == {"a": 1, "b": 3}
    assert (result["history"], result["unit"]) == ([], "ms")


def test_what_was_measured_at_an_earlier_commit_is_kept_in_short(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    for commit in ("first", "second"):
        write_with_history(output, "some", {}, {"a": 1, "b": 2}, short)
        output.write_text(json.dumps(json.loads(output.read_text()) | {"commit": commit}))
    write_with_history(output, "some", {}, {"a": 5}, short)
    result = json.loads(output.read_text())
    assert result["parts"] == {"a": 5}
    assert [(each["commit"], each["sum"]) for each in result["history"]] == [("first", 3), ("second", 3)]
