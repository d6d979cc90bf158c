"""Sentences that cite a result: of the code as it is, or with the commit that it was measured at."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal

import pytest

from benchmarks.page_section import commits_of
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
    commits = {str(each["commit"]) for each in (document, *parts)} | {*commits_of(document)}
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
            commits = [each[:SHORT] for each in commits_of(json.loads((RESULTS / name).read_text()))]
            missing = [each for each in commits if each not in block]
            wrong += [f"{name} is of {each}, and the code that it measured has changed since" for each in missing]
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


def rounded(value: float) -> str:
    """Round as every figure of README's comparison is rounded: to a whole number, halves up."""
    return f"{Decimal(str(value)).quantize(Decimal(1), ROUND_HALF_UP):,}"


def medians(name: str, load: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads((RESULTS / f"{name}.json").read_text())["medians"][load]
    return found


def milliseconds(name: str, system: str) -> str:
    """List a system's first tokens at 1, 2 and 4 requests a second, p50."""
    a, b, c = (rounded(1e3 * medians(name, f"rate-{rate}")[system]["first_token_p50_s"]) for rate in (1, 2, 4))
    return f"{a}, {b} and {c}"


def test_the_table_of_engines_has_the_records_medians() -> None:
    row = re.compile(r"(?m)^\| (\d+M), (\w+), (ShareGPT|Alpaca)[^|]*\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$")
    text = (ROOT / "README.md").read_text()
    rows = list(row.finditer(text))
    assert len(rows) > 10
    for each in rows:
        shape, dtype, trace, *cells = each.groups()
        kind = "amx_" if ", AMX" in each[0] else ""
        found = medians(f"peers_{kind}{shape.lower()}_{dtype}", trace.lower())
        systems = ("quire", "openvino", "vllm", "transformers")
        for system, cell in zip(systems, cells, strict=True):
            assert cell in ("–", rounded(found[system]["tokens_per_s"]) if system in found else "–"), each[0]


def test_what_is_not_ahead_is_said_with_the_records_figures() -> None:
    text = (ROOT / "README.md").read_text()
    epyc, amx = "peers_125m_bfloat16", "peers_amx_125m_bfloat16"
    said = re.findall(r"(?m)^Not ahead yet, (?:on the EPYC|with AMX): .*$", text)
    assert f"p50 {milliseconds(epyc, 'quire')} ms against {milliseconds(epyc, 'openvino')}" in said[0]
    assert f"{milliseconds(amx, 'quire')} ms against {milliseconds(amx, 'openvino')}" in said[1]
    lower = []
    for rate in (1, 2, 4):
        each = medians(amx, f"rate-{rate}")
        ours, theirs = (each[system]["normalised_latency_s"] for system in ("quire", "openvino"))
        lower.append(int(rounded(100 * (1 - ours / theirs))))
    assert f"{min(lower)} to {max(lower)} % lower (medians)" in said[1]


@pytest.mark.parametrize(("place", "name"), [(0, "peers_125m_bfloat16"), (1, "peers_amx_125m_bfloat16")])
def test_a_first_token_that_misses_its_target_at_p99_is_named(place: int, name: str) -> None:
    said = re.findall(r"(?m)^Not ahead yet, (?:on the EPYC|with AMX): .*$", (ROOT / "README.md").read_text())[place]
    section = section_of_kind("peers").render
    assert section is not None
    headlines = section(json.loads((RESULTS / f"{name}.json").read_text())).headlines
    for headline in headlines:
        missed = [target for target in headline.targets if target.is_met is False]
        found = re.match(r"rate-(\d), first token p99: ([\d.]+)", headline.figure)
        if missed and found:
            assert f"at {found[1]} a second p99, too ({found[2]} ×)" in said


@pytest.mark.parametrize("page", ["README.md", "docs/durability.md"])
def test_failovers_are_quoted_with_one_live_request_and_with_many(page: str) -> None:
    document = json.loads((RESULTS / "failover_time.json").read_text())
    silences = {(each["how"], each["requests"]): f"{each['silence_s']:.2f} s" for each in document["rows"]}
    said = paragraph_of(page, "failover_time.json")
    for requests in (1, 2000):
        both = [silences[how, requests] for how in ("kill -9", "SIGTERM")]
        assert re.search(" .{0,20}and ".join(both) + (".* with one live request", " with 2,000")[requests > 1], said)
    assert ("none of 16 streams" in said) == ("silence_of" not in document)


def test_readme_says_that_vllm_ran_without_its_openmp_as_long_as_a_cited_record_is_so() -> None:
    said = paragraph_of("README.md", "peers_125m_float32.json")
    records = [json.loads((RESULTS / name).read_text()) for name in cited_in(said)]
    lacking = [each for each in records if "LD_PRELOAD" not in each["peers"]["vllm"]["variables"]]
    assert ("vLLM ran without Intel's OpenMP preloaded" in said) == bool(lacking)
