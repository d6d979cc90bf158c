"""Rounds and verdict of the benchmark of the containers."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.containers import SECTION, by_name, figures_of, measure, section_of


def test_each_round_starts_both_alone_and_another_one_first() -> None:
    running: list[str] = []
    asked: list[str] = []

    @contextmanager
    def deployment(name: str) -> Iterator[None]:
        running.append(name)
        yield
        running.remove(name)

    def ask() -> float:
        asked.extend(running)
        return float(len(asked))

    found = measure([lambda: deployment("serve"), lambda: deployment("containers")], 3, ask)
    assert asked == ["serve", "containers", "containers", "serve", "serve", "containers"]
    assert found == [[1.0, 2.0], [4.0, 3.0], [5.0, 6.0]]


@pytest.mark.parametrize(("inside", "verdict"), [(96.0, "met"), (94.0, "1 of 1 within the noise")])
def test_the_verdict_is_that_of_all_rounds_and_the_figure_the_median_of_their_ratios(
    inside: float, verdict: str
) -> None:
    figures = figures_of([[100.0, inside], [200.0, 2.0 * inside], [50.0, 60.0]])
    assert by_name(figures) == {
        "quire serve": [100.0, 200.0, 50.0, 100.0],
        "containers": [inside, 2.0 * inside, 60.0, inside],
    }
    section = section_of({"model": "125m", "dtype": "bfloat16", "load": "alpaca", "target": 0.95, **figures})
    assert SECTION.render is section_of
    assert section.verdict == verdict
    assert f"{inside:g}.0 % of" in section.headlines[0].figure
