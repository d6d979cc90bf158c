"""Sampling parameters in generation_config.json: read, checked, and left out where they are not wanted."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.worker.forked_worker import run_worker
from tests.worker.tiny_models import write_tiny_model
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.generation_defaults import read_sampling_defaults


def write(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_a_folder_without_the_file_recommends_nothing(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}


def test_what_the_file_says_is_recommended_and_null_is_not(tmp_path: Path) -> None:
    said: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05}
    beside = {"do_sample": True, "eos_token_id": [1, 2], "max_new_tokens": 9, "typical_p": 0.1}
    assert read_sampling_defaults(write(tmp_path, {**said, **beside})) == said
    assert read_sampling_defaults(write(tmp_path, dict.fromkeys(said))) == {}
    for all_tokens in (0, -1):
        assert read_sampling_defaults(write(tmp_path, {"top_k": all_tokens})) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.6"),
        ("temperature", True),
        ("temperature", [0.6]),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("top_k", -2),
        ("top_k", 20.5),
        ("top_k", 10**30),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", {}),
    ],
)
def test_what_no_request_could_ask_for_is_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key} is "):
        read_sampling_defaults(write(tmp_path, {key: value}))


def test_a_worker_that_is_to_leave_them_out_does_not_mind_what_they_are(tmp_path: Path) -> None:
    folder = write_tiny_model("gpt2", tmp_path)
    write(folder, {"temperature": -1})
    flags = ("--model", str(folder), "--check")
    assert run_worker(*flags).returncode == 2
    assert run_worker(*flags, "--generation-config", "none").returncode == 0
