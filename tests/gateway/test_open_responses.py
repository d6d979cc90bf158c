"""Reading of the compliance suite's report, without the suite."""

from typing import Any

import pytest

from tests.open_responses import runs_of


def report(*outcomes: tuple[str, str]) -> dict[str, Any]:
    """A report in the suite's form."""
    return {"results": [{"id": name, "name": name.title(), "status": outcome} for name, outcome in outcomes]}


def test_a_template_has_to_pass_unless_its_subject_is_not_offered() -> None:
    runs = runs_of(report(("tool-calling", "failed"), ("image-input", "failed"), ("multi-turn", "passed")))
    assert [(run.id, run.is_fault) for run in runs] == [
        ("image-input", False),
        ("multi-turn", False),
        ("tool-calling", True),
    ]


def test_a_skipped_template_is_a_fault() -> None:
    assert runs_of(report(("basic-response", "skipped")))[0].is_fault


def test_a_report_without_templates_is_refused() -> None:
    with pytest.raises(ValueError, match="no template"):
        runs_of(report())
