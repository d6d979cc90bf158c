"""Comparison of two runs of the harness, from files as it writes them. Starts nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.__main__ import is_met
from tests.evaluation.scores import Scores, compare, read_scores
from tests.evaluation.task_data import write_data


def test_scores_and_answers_are_read(tmp_path: Path) -> None:
    results: dict[str, Any] = {
        "a": {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1},
        "b": {"exact_match,none": 1.0},
    }
    (tmp_path / "results_1.json").write_text(json.dumps({"results": results}))
    (tmp_path / "samples_a_1.jsonl").write_text('{"doc_id": 0, "resps": [[["-1.5", "True"]], [["-2", "False"]]]}\n')
    (tmp_path / "samples_b_1.jsonl").write_text('{"doc_id": 1, "resps": [["y"]]}\n{"doc_id": 0, "resps": [["x"]]}\n')
    assert read_scores(tmp_path) == {
        "a": Scores({"acc": 0.5}, [[-1.5, -2.0]]),
        "b": Scores({"exact_match": 1.0}, ["x", "y"]),
    }


@pytest.mark.parametrize(
    ("served", "in_process", "is_equal"),
    [
        (Scores({"acc": 0.5}, [[-1.0]]), Scores({"acc": 0.5}, [[-1.0001]]), True),
        (Scores({"acc": 0.5}, [[-1.0]]), Scores({"acc": 0.5}, [[-1.1]]), False),
        (Scores({"acc": 0.5}, [[-1.0]]), Scores({"acc": 0.5000001}, [[-1.0]]), False),
        (Scores({"byte_perplexity": 2.0}, [[-1.0]]), Scores({"byte_perplexity": 2.000001}, [[-1.0]]), True),
        (Scores({"exact_match": 0.0}, ["x"]), Scores({"exact_match": 0.0}, ["y"]), False),
    ],
)
def test_counts_and_texts_are_compared_exactly_and_sums_within_a_tolerance(
    served: Scores, in_process: Scores, is_equal: bool
) -> None:
    assert is_met(compare("task", "api", served, in_process)) is is_equal


def test_a_seed_gives_the_same_data(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_data(tmp_path / name, 30, seed=1)
    files = sorted(each.name for each in (tmp_path / "first").iterdir())
    assert files == ["answers.jsonl", "choices.jsonl", "continuations.jsonl", "stories.jsonl"]
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
