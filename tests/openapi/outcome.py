"""Outcome of a run of schemathesis, read from the events that it writes. Starts nothing."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

NO_ANSWER = "none"  # in place of a status


@dataclass(slots=True)
class Outcome:
    """Cases, answers and failed checks."""

    answers: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # by operation, by status
    phases: Counter[str] = field(default_factory=Counter)  # cases by phase
    checks: Counter[str] = field(default_factory=Counter)  # that passed, by name
    num_streams: int = 0  # answers that were streams of events
    failures: list[str] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        """Cases that were sent."""
        return sum(map(Counter.total, self.answers.values()))

    def record(self) -> dict[str, Any]:
        """Figures that a result keeps."""
        return {
            "num_cases": self.num_cases,
            "num_streams": self.num_streams,
            "phases": dict(sorted(self.phases.items())),
            "checks": dict(sorted(self.checks.items())),
            "operations": {
                label: {"cases": counts.total(), "answers": dict(sorted(counts.items()))}
                for label, counts in sorted(self.answers.items())
            },
            "failures": self.failures,
        }

    def add_all(self, other: "Outcome") -> None:
        """Add another outcome."""
        for label, counts in other.answers.items():
            self.answers[label] += counts
        self.phases += other.phases
        self.checks += other.checks
        self.num_streams += other.num_streams
        self.failures += other.failures

    def require_success(self, paths: Mapping[str, Iterable[str]]) -> None:
        """Count each operation as a failure of which no request succeeded. paths: their methods, by path."""
        for label in (f"{method.upper()} {path}" for path, methods in paths.items() for method in methods):
            counts = self.answers[label]
            if not any(status.startswith("2") for status in counts):
                self.failures.append(f"{label}: none of {counts.total():,} requests succeeded")

    def add(self, lines: Iterable[str]) -> None:
        """Add what the events of one run tell."""
        for line in lines:
            for kind, event in json.loads(line).items():
                if kind == "ScenarioFinished" and "interactions" in event["recorder"]:
                    self._add_scenario(event["recorder"], event["phase"])
                elif kind in ("NonFatalError", "FatalError"):
                    self.failures.append(f"{kind}: {json.dumps(event)[:500]}")

    def _add_scenario(self, recorder: dict[str, Any], phase: str) -> None:
        cases = {case_id: each["value"] for case_id, each in recorder["cases"].items()}
        for case_id, interaction in recorder["interactions"].items():
            answer = interaction["response"]
            status = NO_ANSWER if answer is None else str(answer["status_code"])
            # Cases of other methods than the operation has are listed with it.
            label = f"{cases[case_id]['method']} {cases[case_id]['path']}" if phase == "stateful" else recorder["label"]
            self.answers[label][status] += 1
            self.phases[phase] += 1
            if answer is None:
                self.failures.append(f"{label}: no answer")
            elif "text/event-stream" in str(answer["headers"].get("content-type")):
                self.num_streams += 1
        for case_id, checks in recorder["checks"].items():
            for check in checks:
                if check["status"] == "success":
                    self.checks[check["name"]] += 1
                else:
                    case = cases[case_id]
                    self.failures.append(f"{case['method']} {case['path']}: {json.dumps(check)[:700]}")
