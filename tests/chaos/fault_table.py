"""Results of a chaos run as JSON for machines and as a table for people. Knows no scenario by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.scenario import Figures, Target
from tests.chaos.stage import Scenario

HEAD = (
    *("fault", "what happens", "injected", "promise", "sent", "accepted", "lost", "positions twice", "missing"),
    *(
        "changed",
        "cuts",
        "detected, s",
        "recovered, s",
        "worst stall, s",
        "leaked blocks",
        "died by themselves",
        "tracebacks",
        "other figures",
        "targets",
        "met",
        "machine",
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one scenario."""

    scenario: Scenario
    figures: Figures | None  # None: it broke off
    error: str
    seconds: float

    @property
    def missed(self) -> list[Target]:
        if self.figures is None:
            return list(self.scenario.all_targets)
        return [target for target in self.scenario.all_targets if not target.is_met_by(self.figures)]

    @property
    def is_met(self) -> bool:
        return self.figures is not None and not self.missed

    def as_json(self) -> dict[str, Any]:
        scenario = self.scenario
        return {
            "fault": scenario.fault,
            "title": scenario.title,
            "injected": scenario.injected,
            "promise": scenario.promise,
            "seconds": round(self.seconds, 1),
            "met": self.is_met,
            "targets": [str(target) for target in scenario.all_targets],
            "missed": [str(target) for target in self.missed],
            "error": self.error,
            **(self.figures.as_json() if self.figures is not None else {}),
        }


PAGE = """# What happens under faults

Written by `make chaos`; do not edit. Real processes: a scheduler, workers with the demo model, Valkey with
`appendfsync always`, clients that use the SDK. Each row is one fault of the list that `docs/durability.md` explains,
injected while requests of every kind run (greedy, sampled with a seed, four samples, the best of four, beams, stop
strings, log-probabilities), and everything that every client was told is held against the same requests in a run
without faults.

- *lost*: accepted, and did not finish for their client. *positions twice, missing, changed*: as clients saw them;
  another text or reason of an end counts as a change, too. *cuts*: requests with an output that parts at a near tie of
  the model, which is no change; one is allowed, or 1 % of the requests. A dash: not measured there.
- *detected*: from the fault to the scheduler's log line about it. *recovered*: until every stream that ran had its
  next token, or, where everything stood still, until the first token. *worst stall*: between two tokens of a stream.
- *leaked blocks*: device and host blocks still held once everything has ended, and requests still there.
- *died by themselves*: services that ended by no signal of the scenario, neither in order, nor since another scheduler
  leads, nor with the reason why they do not start. *tracebacks*: in the logs of all services.
- Times hang on the *machine*; rows may be of several runs, and each names the one that it was measured on.

{faults}

## Long runs

{campaigns}
"""


def page(faults: Sequence[dict[str, Any]], campaigns: Sequence[dict[str, Any]]) -> str:
    """Render the whole table, for people."""
    return PAGE.format(faults=table(faults), campaigns=table(campaigns))


def table(results: Sequence[dict[str, Any]]) -> str:
    """Rows as they are in the JSON, in Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(_cells(result)) + " |" for result in results]
    return "\n".join(lines)


def _cells(result: dict[str, Any]) -> list[str]:
    counts = ("sent", "accepted", "lost", "duplicated", "missing", "changed", "cuts")
    times = ("detect_s", "recover_s", "worst_stall_s")
    more = ", ".join(f"{name} {value:g}" for name, value in result.get("more", {}).items())
    return [
        *(_plain(result[name]) for name in ("fault", "title", "injected", "promise")),
        *(_count(result.get(name)) for name in counts),
        *("–" if result.get(name) is None else f"{result[name]:.2f}" for name in times),
        *(_count(result.get(name)) for name in ("leaked_blocks", "died_by_themselves", "tracebacks")),
        more or "–",
        _plain(", ".join(result["targets"])),
        _met(result),
        _plain(result.get("machine", "not recorded")),
    ]


def _count(number: int | None) -> str:
    return "–" if number is None else str(number)


def _met(result: dict[str, Any]) -> str:
    if result["met"]:
        return "yes"
    if result["error"]:
        return "**no**: it broke off: " + _plain(result["error"].splitlines()[0])[:160]
    return "**no**: " + _plain(", ".join(result["missed"]))


def _plain(text: str) -> str:
    return text.replace("|", "\\|")
