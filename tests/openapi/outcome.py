"""Outcome of a run of schemathesis, read from the events that it writes. Starts nothing."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

NO_ANSWER = "none"  # in place of a status


@dataclass(slots=True)
class Outcome:
    """Cases, answers and failed checks."""

    answers: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # by operation, by status
    phases: Counter[str] = field(default_factory=Counter)  # cases by phase
    checks: Counter[str] = field(default_factory=Counter)  # that passed, by name
    failures: list[str] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        """Cases that were sent."""
        return sum(map(Counter.total, self.answers.values()))

    def record(self) -> dict[str, Any]:
        """Figures that a result keeps."""
        return {
            "num_cases": self.num_cases,
            "phases": dict(sorted(self.phases.items())),
            "checks": dict(sorted(self.checks.items())),
            "operations": {
                label: {"cases": counts.total(), "answers": dict(sorted(counts.items()))}
                for label, counts in sorted(self.answers.items())
            },
            "failures": self.failures,
        }


def read_outcome(lines: Iterable[str]) -> Outcome:
    """The outcome that these events tell."""
    outcome = Outcome()
    for line in lines:
        for kind, event in json.loads(line).items():
            if kind == "ScenarioFinished" and "interactions" in event["recorder"]:
                _add(outcome, event["recorder"], event["phase"])
            elif kind in ("NonFatalError", "FatalError"):
                outcome.failures.append(f"{kind}: {json.dumps(event)[:500]}")
    return outcome


def _add(outcome: Outcome, recorder: dict[str, Any], phase: str) -> None:
    for case_id, interaction in recorder["interactions"].items():
        answer = interaction["response"]
        status = NO_ANSWER if answer is None else str(answer["status_code"])
        case = recorder["cases"][case_id]["value"]
        label = f"{case['method']} {case['path']}" if phase == "stateful" else recorder["label"]
        outcome.answers[label][status] += 1
        outcome.phases[phase] += 1
        if answer is None:
            outcome.failures.append(f"{label}: no answer")
    for case_id, checks in recorder["checks"].items():
        for check in checks:
            if check["status"] == "success":
                outcome.checks[check["name"]] += 1
            else:
                case = recorder["cases"][case_id]["value"]
                what = json.dumps(check)[:700]
                outcome.failures.append(f"{case['method']} {case['path']}: {what}")
