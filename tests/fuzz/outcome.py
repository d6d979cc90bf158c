"""Outcome of a stage of the fuzzer, and its faults. Knows no process."""

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

MOST_SHOWN = 20


@dataclass(slots=True)
class Outcome:
    """Outcome of one stage."""

    name: str
    num_inputs: int = 0
    answers: Counter[str] = field(default_factory=Counter)  # by status
    faults: list[str] = field(default_factory=list)  # what must not be, in words
    figures: dict[str, float] = field(default_factory=dict)

    def fail(self, what: str) -> None:
        """Notes what must not be."""
        self.faults.append(what)

    def record(self) -> dict[str, object]:
        """Figures that a result keeps."""
        return {
            "name": self.name,
            "num_inputs": self.num_inputs,
            "answers": dict(sorted(self.answers.items())),
            "faults": self.faults,
            "figures": self.figures,
        }

    def __str__(self) -> str:
        verdict = f"{len(self.faults)} FAULTS" if self.faults else "no fault"
        lines = [f"{self.name}: {self.num_inputs} inputs, {verdict}"]
        lines += [f"    {json.dumps({**dict(sorted(self.answers.items())), **self.figures})}"]
        lines += [f"    {each}" for each in self.faults[:MOST_SHOWN]]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One kind of hostile input. `play` gets how many inputs at most, and the seed."""

    name: str
    num_inputs: int  # of a whole run
    play: Callable[[int, int], Coroutine[None, None, Outcome]]
