"""`docs/results.md` as text, made of result files alone: the same files give the same page.

Knows what every result says of its circumstances; what its figures mean is known to its section.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.page_section import Document, PageSection, Section, commit_of, commits_of, grid
from benchmarks.results_page.catalogue import SECTIONS, section_of_kind

FOLDER = "../benchmarks/results"  # as the page sees it
NOT_MEASURED = "Not measured"

WHAT = """\
What the benchmarks of [benchmarks/README.md](../benchmarks/README.md) found, which says how each of them works. \
Made by `python -m benchmarks.results_page` (`make results-page`) from the files in \
[benchmarks/results](../benchmarks/results); nobody edits it."""

READ = """\
Each section has the commit, machine, versions and command of its figures; they are of different commits, so no two \
need be of the same code, and a result has no date of its own. The load average is that of the last minute of a \
measurement: the benchmark's own work is in it, and so is that of neighbours."""

Results = Mapping[str, Document]  # by the name of the file


def read_results(folder: Path) -> dict[str, Document]:
    """Read all results of a folder."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def read_plots(folder: Path) -> list[str]:
    """Names of the plots of a folder."""
    return sorted(path.name for path in folder.glob("*.svg"))


def page(results: Results, plots: Sequence[str]) -> str:
    """Text of the page. Raises ValueError for a result without a section."""
    return "\n\n".join(_blocks(results, plots)) + "\n"


def anchors(results: Results) -> dict[str, str]:
    """File of each section by the section's anchor on the page."""
    return {_anchor(_title(benchmark, section)): name for name, (benchmark, section) in _sections(results).items()}


def _blocks(results: Results, plots: Sequence[str]) -> Iterator[str]:
    sections = _sections(results)
    missing = [each for each in SECTIONS if not any(_is_of(each, document) for document in results.values())]
    yield "# Results"
    yield f"{WHAT} {_machines(results)} {READ}"
    yield grid(
        ("benchmark", "what it shows", "figures and their targets", "verdict"),
        [*_measured_rows(sections), *_missing_rows(missing)],
    )
    for name, (benchmark, section) in sections.items():
        yield f"## {_title(benchmark, section)}"
        yield section.done
        yield "\n".join(f"- {headline.sentence}" for headline in section.headlines)
        yield from section.blocks
        yield _circumstances(name, results[name], section, plots)
    if missing:
        yield f"## {NOT_MEASURED}"
        yield "These benchmarks have no result yet:"
        yield grid(("benchmark", "command"), [(each.title, f"`{each.command}`") for each in missing])


def _sections(results: Results) -> dict[str, tuple[PageSection, Section]]:
    """Render the sections by file, in the order of the catalogue."""
    order: dict[str, tuple[PageSection, Section]] = {}
    for name, document in results.items():
        if "benchmark" not in document:
            raise ValueError(f"{name} has no field `benchmark`; it is no result of a benchmark")
        section_of_kind(document["benchmark"])
    for benchmark in SECTIONS:
        for name, document in results.items():
            if _is_of(benchmark, document):
                if benchmark.render is None:
                    raise ValueError(f"{name} is the first result of its kind; write the section that shows it")
                order[name] = benchmark, benchmark.render(document)
    return order


def _is_of(benchmark: PageSection, document: Document) -> bool:
    return document["benchmark"] in benchmark.kinds


def _machines(results: Results) -> str:
    machines = sorted({_machine(document) for document in results.values()})
    where = f"Everything here was measured on {' or on '.join(machines)}."
    has_gpu = any(document["machine"].get("gpu") for document in results.values())
    return where if has_gpu else f"{where} Nothing has been measured on a GPU yet."


def _machine(document: Document) -> str:
    machine = document["machine"]
    gpu = f" with {machine['gpu']}" if machine.get("gpu") else ""
    kind = ", ".join((machine["architecture"], *machine.get("instructions", ())))
    return f"{machine['cpus']} cores of {machine['cpu']} ({kind}){gpu}"


def _title(benchmark: PageSection, section: Section) -> str:
    return f"{benchmark.title}: {section.variant}" if section.variant else benchmark.title


def _link(title: str) -> str:
    """Link to a section, by the anchor made from its title."""
    return f"[{title}](#{_anchor(title)})"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _measured_rows(sections: Mapping[str, tuple[PageSection, Section]]) -> Iterator[tuple[str, ...]]:
    for benchmark, section in sections.values():
        figures = "<br>".join(headline.sentence for headline in section.headlines)
        yield _link(_title(benchmark, section)), benchmark.question, figures, section.verdict


def _missing_rows(missing: Sequence[PageSection]) -> Iterator[tuple[str, ...]]:
    for benchmark in missing:
        link = _link(NOT_MEASURED).replace(NOT_MEASURED, benchmark.title)
        target = f" (target {benchmark.target})" if benchmark.target is not None else ""
        yield link, benchmark.question, f"not measured{target}", "not measured"


def _commits(document: Document) -> str:
    found = commits_of(document)
    return f"Commit{'s' if len(found) > 1 else ''} {', '.join(map(commit_of, found))}"


def _circumstances(name: str, document: Document, section: Section, plots: Sequence[str]) -> str:
    versions = document["versions"]
    known = [f"{package} {versions[package]}" for package in section.versions if versions.get(package)]
    facts = [
        _commits(document),
        f"{_machine(document)}, load average {document['machine']['load_average']:g}",
        ", ".join([f"Python {versions['python']}", *known]),
        f"`{document['command']}`",
        f"[{name}]({FOLDER}/{name})",
    ]
    own = [plot for plot in plots if plot.startswith((f"{Path(name).stem}.", f"{Path(name).stem}_"))]
    if own:
        facts.append("plots: " + ", ".join(f"[{plot}]({FOLDER}/{plot})" for plot in own))
    return "; ".join(facts) + "."
