"""The runs of a campaign, one a line, added as they end: what an interrupted campaign goes on from.

The first line says what was planned; a campaign goes on only with a file of its own plan, and keeps only runs of the
commit and machine that it is of itself: a result has one commit, and must not stand for code that was not measured.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Figures
from benchmarks.report import origin as origin_now


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
    origin: dict[str, Any] | None = None  # commit and machine, filled in as the run is recorded; None: not known

    @property
    def key(self) -> tuple[int, str, str]:
        return self.round, self.system, self.load


class RunsFile:
    """Record of all runs, on disk and in `runs`: by round, system and load."""

    def __init__(
        self,
        path: Path,
        plan: Mapping[str, Any],
        *,
        resume: bool,
        origin: Callable[[], dict[str, Any]] = origin_now,
    ) -> None:
        self._path = path
        self._origin = origin
        self.runs: dict[tuple[int, str, str], Run] = {}
        wanted = json.loads(json.dumps(plan))
        if resume and path.is_file():
            lines = _lines(path)
            if next(lines, None) == wanted:
                here = json.loads(json.dumps(origin()))
                self.runs = {run.key: run for run in map(_run, lines) if run.error is None and run.origin == here}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(each) + "\n" for each in [wanted, *map(asdict, self.runs.values())]))

    def add(self, run: Run) -> None:
        run = replace(run, origin=self._origin())
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
