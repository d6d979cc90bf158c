"""A warning of what comes often: the first line at once, then one a minute with the number of times."""

import pytest
from structlog.testing import capture_logs

from common import rare_warning
from common.rare_warning import RareWarning


def test_the_first_time_is_told_at_once_and_further_ones_are_counted() -> None:
    warning = RareWarning("too many", most=3)
    with capture_logs() as logs:
        for _ in range(1000):
            warning.record()
    assert logs == [{"event": "too many", "most": 3, "times": 1, "log_level": "warning"}]


def test_a_later_line_tells_how_often_it_happened_since(monkeypatch: pytest.MonkeyPatch) -> None:
    warning = RareWarning("too many")
    with capture_logs() as logs:
        for _ in range(5):
            warning.record()
        monkeypatch.setattr(rare_warning, "EVERY_S", 0.0)
        warning.record()
    assert [line["times"] for line in logs] == [1, 5]


def test_a_line_has_the_values_of_the_time_that_it_tells() -> None:
    warning = RareWarning("too many", most=3)
    with capture_logs() as logs:
        warning.record(reason="first")
        warning.record(reason="second")
    assert [line["reason"] for line in logs] == ["first"]
