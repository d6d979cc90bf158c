"""Sentences that cite a result: of the code as it is, or with the commit that it was measured at."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence

import pytest

from benchmarks.report import RESULTS, ROOT
from benchmarks.results_page.catalogue import SECTIONS, section_of_kind
from benchmarks.results_page.page import anchors, read_results
from tests.worker.tiny_models import TINY_MODELS

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
LINKED = re.compile(r"\((?:docs/)?results\.md#([\w-]+)\)")  # a section of the results page
ANCHORS = anchors(read_results(RESULTS))
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


def cited_in(block: str) -> list[str]:
    """Files that a paragraph links, themselves or by their sections of the results page."""
    files = [name for _, name in CITED.findall(block)]
    return files + [ANCHORS[anchor] for anchor in LINKED.findall(block) if anchor in ANCHORS]


def uncited(text: str) -> list[str]:
    """List results of older code whose commit the citing paragraph does not name."""
    wrong = []
    for block in re.split(r"\n\s*\n", text):
        for name in cited_in(block):
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
    section = next(anchor for anchor, file in ANCHORS.items() if file == name)
    assert uncited(f"Fast ([it](docs/results.md#{section})).") != []


def test_every_benchmark_names_code_that_is_there() -> None:
    missing = [(each.title, path) for each in SECTIONS for path in each.measures if not (ROOT / path).exists()]
    assert all(each.measures for each in SECTIONS) and not missing


def paragraph_of(page: str, name: str) -> str:
    """Find the paragraph of a page that cites a result first."""
    blocks = re.split(r"\n\s*\n", (ROOT / page).read_text())
    return next(block for block in blocks if name in cited_in(block))


def test_what_ran_on_a_gpu_is_what_the_record_says_passed() -> None:
    stages = json.loads((RESULTS / "gpu_check.json").read_text())["stages"]
    said = paragraph_of("README.md", "gpu_check.json")
    families, of_families = map(int, re.findall(r"(\d+) of (\d+) model families", said)[0])
    passed = [stage["key_figures"].get("passed", 0) for stage in stages if "test_families" in stage["name"]]
    assert (families, of_families) == (sum(passed), len(TINY_MODELS))
    kernels = [stage["status"] == "passed" for stage in stages if stage["name"].startswith("kernels/")]
    assert f"{sum(kernels)} of {len(kernels)} files of kernel tests" in said
    claimed, _, late = said.partition("Out of time")
    late, _, _ = late.partition(".")
    for stage in stages:
        kind, _, name = stage["name"].partition("/")
        if kind == "services":
            assert f"`{name}`" in (claimed if stage["status"] == "passed" else late), stage["name"]
