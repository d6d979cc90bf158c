"""The runs of a campaign, one a line, added as they end: what an interrupted campaign goes on from.

The first line says what was planned; a campaign goes on only with a file of its own plan.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One system at one load in one round, or why there are no figures."""

    round: int
    system: str
    load: str
    figures: Figures | None
    error: str | None = None
    token_ids: list[list[int]] | None = None  # None: not kept
    about: dict[str, Any] | None = None  # what the runner said of itself; None: it never did

    @property
    def key(self) -> tuple[int, str, str]:
        return self.round, self.system, self.load


class RunsFile:
    """Record of all runs, on disk and in `runs`: by round, system and load."""

    def __init__(self, path: Path, plan: Mapping[str, Any], *, resume: bool) -> None:
        self._path = path
        self.runs: dict[tuple[int, str, str], Run] = {}
        wanted = json.loads(json.dumps(plan))
        if resume and path.is_file():
            lines = _lines(path)
            if next(lines, None) == wanted:
                self.runs = {run.key: run for run in map(_run, lines) if run.error is None}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(each) + "\n" for each in [wanted, *map(asdict, self.runs.values())]))

    def add(self, run: Run) -> None:
        self.runs[run.key] = run
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read lines up to an incomplete one."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _run(fields: dict[str, Any]) -> Run:
    figures = fields.pop("figures")
    return Run(**fields, figures=Figures(**figures) if figures is not None else None)
