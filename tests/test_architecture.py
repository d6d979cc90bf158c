"""Pages about the code name what is there: files, headings, make targets, benchmarks; `docs/files.md` is generated."""

import re
from pathlib import Path

import pytest

from tests.files_page import PAGE, ROOT, listed_files, page
from tests.project_files import project_files

GENERATED = {"docs/results.md", "docs/files.md"}  # with tests of their own, and the commands of earlier commits
PAGES = sorted(
    name
    for folder in (".", "docs", "benchmarks", "demo")
    for name in (str(each.relative_to(ROOT)) for each in (ROOT / folder).glob("*.md"))
    if name not in GENERATED
)
NAMED_FILE = re.compile(r"`([\w./]+\.(?:py|proto|cpp|h|toml|yaml))`")
OF_A_USER = {"config.toml"}  # which other programs read
NAMED_TARGET = re.compile(r"(?:`|^)make ([a-z-]+)\b", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
RUN_BENCHMARK = re.compile(r"-m (benchmarks[\w.]*)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def anchors_of(path: Path) -> set[str]:
    """Names by which the headings of a page are linked."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings}


def test_the_page_of_files_is_what_their_first_sentences_make() -> None:
    assert PAGE.read_text() == page(listed_files()), "run `make files-page`"


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_exist(name: str) -> None:
    ends = {"/" + path for path in project_files(ROOT)}
    named = set(NAMED_FILE.findall(text_of(name))) - OF_A_USER
    missing = [each for each in named if not any(path.endswith("/" + each) for path in ends)]
    assert not missing, f"{name} names files that are not there: {missing}"


@pytest.mark.parametrize("name", PAGES)
def test_links_of_a_page_lead_to_files_and_headings(name: str) -> None:
    path = ROOT / name
    for target, anchor in LINK.findall(path.read_text()):
        linked = (path.parent / target).resolve() if target else path
        assert linked.exists(), f"{name} links {target}"
        assert not anchor or anchor in anchors_of(linked), f"{name} links #{anchor} of {target or 'itself'}"


@pytest.mark.parametrize("name", PAGES)
def test_make_targets_that_a_page_names_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert set(NAMED_TARGET.findall(text_of(name))) <= targets


def test_every_make_target_and_variable_is_described() -> None:
    makefile = text_of("Makefile")
    [phony] = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    described = text_of("CONTRIBUTING.md") + text_of("README.md") + text_of("benchmarks/README.md")
    assert [each for each in phony.split() if not re.search(rf"make (?:\w+ )*{each}\b", described)] == ["clean"]
    own = {"BIN", "CODE", "NEWEST", "PIP", "PROTOS", "RUN_TESTS", "VENV"}
    used = set(re.findall(r"\$\(([A-Z_]+)\)", makefile)) - own
    assert used == set(re.findall(r"^#   ([A-Z_]+) ", makefile, re.MULTILINE))


def test_the_page_of_benchmarks_marks_those_that_make_bench_runs() -> None:
    table = re.findall(
        r"^\| `python -m (benchmarks[\w.]*)` \| .* \| (yes)? ?\|$", text_of("benchmarks/README.md"), re.M
    )
    [recipe] = re.findall(r"^bench: .*\n((?:\t.*\n)+)", text_of("Makefile"), re.MULTILINE)
    assert {program for program, mark in table if mark} == set(RUN_BENCHMARK.findall(recipe)) - {
        "benchmarks.results_page"
    }
    assert len(table) > len(recipe.splitlines())
