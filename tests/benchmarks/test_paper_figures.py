"""Every figure from short traces: rows, verdicts, plots and the page; and the same numbers again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.paper.__main__ import measure
from benchmarks.paper.figures import FIGURES, jobs_of, rows_of
from benchmarks.paper.jobs import FULL, QUICK, Row
from benchmarks.paper.page import write_page
from benchmarks.paper.verdicts import verdicts

TINY = replace(
    QUICK,
    duration_s={"sharegpt": 30, "alpaca": 2},
    short_s={"sharegpt": 20, "alpaca": 1.5},
    num_sampled={"sharegpt": 10, "alpaca": 20},
    num_searched={"sharegpt": 10, "alpaca": 10},
)


def fig2(system: str, rate: float, use: float, paper: float, *, factor: float = 1.0) -> Row:
    return {"system": system, "rate": rate, "cost_factor": factor, "use": [use], "paper": [paper]}


@pytest.mark.parametrize("figure", FIGURES)
def test_a_row_of_each_figure_is_the_same_again(figure: str) -> None:
    jobs = jobs_of([figure], TINY)
    first = min(jobs, key=lambda job: job.is_long)
    assert json.dumps(first.run()) == json.dumps(first.run())
    assert len(jobs) <= len(jobs_of([figure], FULL))


def test_processes_make_the_rows_that_one_makes() -> None:
    figures = ["table1", "fig19a", "fig13"]
    assert rows_of(figures, TINY, 2) == rows_of(figures, TINY, 1)


def test_what_is_within_the_bound_is_met() -> None:
    rows = [fig2("quire", 4.0, 92.4, 96.3), fig2("max", 4.0, 24.5, 20.4)]
    first, second = verdicts({"fig2": rows})
    assert (first.verdict, first.difference) == ("met", "-3.9 points")
    assert (second.verdict, second.difference) == ("not met", "+4.1 points")


def test_a_ratio_is_held_against_the_papers_ratio() -> None:
    def row(system: str, capacity: float) -> Row:
        own = {"model": "opt-13b", "dataset": "sharegpt", "cost_factor": 1.0}
        return {**own, "system": system, "capacity": capacity}

    found = verdicts({"fig12": [row("quire", 2.2), row("oracle", 1.1), row("max", 0.5), row("fastertransformer", 0.2)]})
    assert [(each.paper, each.ours, each.verdict) for each in found] == [
        (1.76, 2.0, "met"),  # + 14 %
        (3.67, 4.4, "not met"),  # + 20 %
        (8.35, 11.0, "reported"),
    ]


def test_some_figures_are_measured_again_and_the_others_stay(tmp_path: Path) -> None:
    output = tmp_path / "paper.json"
    measure(["table1", "fig19a"], output, is_quick=True, num_processes=1)
    before = json.loads(output.read_text())
    measure(["fig11"], output, is_quick=True, num_processes=1)
    after = json.loads(output.read_text())
    assert list(after["figures"]) == ["table1", "fig11", "fig19a"]
    assert after["figures"]["fig19a"] == before["figures"]["fig19a"]
    assert [path.name for path in tmp_path.iterdir()] == ["paper.json"]


def test_the_page_is_made_of_the_file_alone(tmp_path: Path) -> None:
    output = tmp_path / "paper.json"
    measure(["table1", "fig1", "fig11", "fig13", "fig19a", "fig19b"], output, is_quick=True, num_processes=1)
    result: dict[str, Any] = json.loads(output.read_text())
    pages = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_page(result, tmp_path / name)
        pages.append({path.name: path.read_bytes() for path in sorted((tmp_path / name).rglob("*.*"))})
    assert pages[0] == pages[1]
    page = pages[0]["paper.md"].decode()
    plots = [name for name in pages[0] if name.endswith(".svg")]
    assert "15,728" in page and len(plots) == 7
    for name in plots:
        assert f"(paper/{name})" in page
        ElementTree.fromstring(pages[0][name])


def test_the_page_says_what_the_kept_result_says() -> None:
    """A page is there if a result is."""
    root = Path(__file__).resolve().parents[2]
    output, page = root / "benchmarks" / "results" / "paper.json", root / "docs" / "paper.md"
    assert page.exists() == output.exists()
    result: dict[str, Any] = {"figures": {}, "is_quick": False}
    if output.exists():
        result = json.loads(output.read_text())
    assert not result["is_quick"]
    for verdict in verdicts(result["figures"]):
        assert f"| {verdict.claim} | {verdict.paper:g} | {verdict.ours:g} |" in page.read_text()
