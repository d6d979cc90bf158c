"""Scores and answers of one run of the harness, read from the files that it writes, and a comparison of two runs."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Sums of log-probabilities of float32, which another order of additions changes in the last bits.
LOGPROB_TOLERANCE = 1e-3
RELATIVE_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Scores:
    """One task by one model."""

    metrics: dict[str, float]
    answers: list[Any]  # of the model to each item: texts, or log-likelihoods


@dataclass(frozen=True, slots=True)
class Comparison:
    """One task by two models."""

    task: str
    api: str
    served: dict[str, float]
    in_process: dict[str, float]
    num_items: int
    num_equal_texts: int | None  # None: it generates none
    greatest_difference: float | None  # between two log-likelihoods; None: it has none

    @property
    def is_equal(self) -> bool:
        """True if all scores are equal: counts exactly, those made of log-likelihoods within the tolerance."""
        return self.served.keys() == self.in_process.keys() and all(
            math.isclose(value, self.in_process[name], rel_tol=0.0 if _counts(name) else RELATIVE_TOLERANCE)
            for name, value in self.served.items()
        )


def read_scores(folder: Path) -> dict[str, Scores]:
    """Scores by task."""
    (results,) = folder.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    return {task: _scores(folder, task, _metrics(metrics)) for task, metrics in found.items()}


def compare(task: str, api: str, served: Scores, in_process: Scores) -> Comparison:
    """Compare a task item by item."""
    pairs = list(zip(served.answers, in_process.answers, strict=True))
    texts = [pair for pair in pairs if isinstance(pair[0], str)]
    numbers = [(a, b) for pair in pairs if not isinstance(pair[0], str) for a, b in zip(*pair, strict=True)]
    return Comparison(
        task=task,
        api=api,
        served=served.metrics,
        in_process=in_process.metrics,
        num_items=len(pairs),
        num_equal_texts=sum(a == b for a, b in texts) if texts else None,
        greatest_difference=max(abs(a - b) for a, b in numbers) if numbers else None,
    )


def _counts(metric: str) -> bool:
    return metric in ("acc", "acc_norm", "exact_match")


def _metrics(found: dict[str, Any]) -> dict[str, float]:
    return {
        name.partition(",")[0]: value
        for name, value in found.items()
        if isinstance(value, float) and "stderr" not in name
    }


def _scores(folder: Path, task: str, metrics: dict[str, float]) -> Scores:
    return Scores(metrics, list(_answers(folder, task, are_texts="exact_match" in metrics)))


def _answers(folder: Path, task: str, *, are_texts: bool) -> Iterator[Any]:
    """The answer to each item, in their order: a text, or the log-likelihood of each continuation."""
    (samples,) = folder.rglob(f"samples_{task}_*.jsonl")
    items = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda item: item["doc_id"])
    for item in items:
        given = [each[0] for each in item["resps"]]
        yield given[0] if are_texts else [_number(each) for each in given]


def _number(given: Any) -> float:
    """A log-likelihood, alone or with the flag of a greedy continuation."""
    return float(given[0] if isinstance(given, list) else given)
