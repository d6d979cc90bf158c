"""Sentences that cite a result: of the code as it is, or with the commit that it was measured at."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence

import pytest

from benchmarks.report import RESULTS, ROOT
from benchmarks.results_page.catalogue import SECTIONS, section_of_kind

PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "docs/durability.md",
    "docs/shards.md",
    "docs/worker.md",
    "docs/wire.md",
    "benchmarks/README.md",
)
CITED = re.compile(r"\(([\w./]*benchmarks/results/|results/)(\w+\.json)\)")
SHORT = 7  # characters of a commit that name it


def has_changed_since(commit: str, paths: Sequence[str]) -> bool:
    """True also if the commit is not known here: it is another one, or there is no repository or no git."""
    command = ["git", "diff", "--quiet", commit, "--", *paths]
    return (
        shutil.which("git") is None
        or subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode != 0
    )


def is_of_this_code(name: str) -> bool:
    """True if nothing that the result measured has changed since its commit, or the commits of its parts."""
    document = json.loads((RESULTS / name).read_text())
    parts = [*document.get("faults", ()), *document.get("campaigns", ())] if document["benchmark"] == "chaos" else []
    commits = {str(each["commit"]) for each in (document, *parts)}
    paths = section_of_kind(document["benchmark"]).measures
    return all(not commit.endswith("-dirty") and not has_changed_since(commit, paths) for commit in commits)


def uncited(text: str) -> list[str]:
    """List results of older code whose commit the citing paragraph does not name."""
    wrong = []
    for block in re.split(r"\n\s*\n", text):
        for _, name in CITED.findall(block):
            if is_of_this_code(name):
                continue
            commit = str(json.loads((RESULTS / name).read_text())["commit"])[:SHORT]
            if commit not in block:
                wrong.append(f"{name} is of {commit}, and the code that it measured has changed since")
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_a_figure_of_older_code_is_cited_with_its_commit(page: str) -> None:
    wrong = uncited((ROOT / page).read_text())
    assert not wrong, f"{page}: name the commit in the paragraph, or measure again: {wrong}"


def test_a_figure_without_its_commit_is_found() -> None:
    name = next(each.name for each in sorted(RESULTS.glob("*.json")) if not is_of_this_code(each.name))
    commit = json.loads((RESULTS / name).read_text())["commit"][:SHORT]
    assert uncited(f"Fast ([it](benchmarks/results/{name})).") != []
    assert uncited(f"Fast at {commit} ([it](benchmarks/results/{name})).") == []


def test_every_benchmark_names_code_that_is_there() -> None:
    missing = [(each.title, path) for each in SECTIONS for path in each.measures if not (ROOT / path).exists()]
    assert all(each.measures for each in SECTIONS) and not missing
