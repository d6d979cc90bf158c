"""Tokens that end an answer: ids of the model's files, else the tokenizer's; a warning if the ids leave it out."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models

from quire.worker_settings import WorkerSettings
from tests.services import DEMO_MODEL, ROOT
from tests.worker.tiny_models import write_tiny_model
from worker_svc.checkpoint.tokenizer_files import EndToken
from worker_svc.loaded_model import LoadedModel
from worker_svc.model.families import read_model_config
from worker_svc.start.end_tokens import end_token_ids, left_out_warning
from worker_svc.start.loading import load_model
from worker_svc.start.preflight import check_folder

TOKENIZER = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "<|im_end|>": 4}, [])).to_str()
END = EndToken("<|im_end|>", 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose config.json says that 2 ends an answer, and whose tokenizer says that 4 does."""
    write_tiny_model("qwen2", tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def change(folder: Path, **values: Any) -> None:
    """Change values of config.json; `generation`: the whole generation_config.json."""
    if (generation := values.pop("generation", None)) is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **values}))


def load(folder: Path) -> tuple[LoadedModel, list[str]]:
    """The loaded model, and the warnings of its start."""
    with capture_logs() as said:
        loaded = load_model(WorkerSettings(model=str(folder), device="cpu", num_blocks=8, max_num_seqs=2))
    return loaded, [each["event"] for each in said if each["log_level"] == "warning"]


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ({}, (2,)),
        ({"eos_token_id": None}, (4,)),
        ({"eos_token_id": []}, (4,)),
        ({"eos_token_id": None, "generation": {"temperature": 0.5}}, (4,)),
        ({"generation": {"eos_token_id": None}}, (2,)),
        ({"eos_token_id": None, "generation": {"eos_token_id": [3, 1]}}, (3, 1)),
        ({"eos_token_id": 4}, (4,)),
    ],
)
def test_the_tokenizers_token_ends_an_answer_where_no_file_says_what_does(
    folder: Path, values: dict[str, Any], ends: tuple[int, ...]
) -> None:
    change(folder, **values)
    config = read_model_config(folder)
    assert end_token_ids(config, END) == ends
    assert end_token_ids(config, None) == config.eos_token_ids
    assert (left_out_warning(config, END) is None) is (4 in ends)
    assert len(check_folder(folder)) == (4 not in ends)


def test_a_token_that_the_model_cannot_give_ends_nothing_and_is_not_missed(folder: Path) -> None:
    change(folder, eos_token_id=None)
    config = read_model_config(folder)
    beyond = replace(config, vocab_size=4)
    assert (end_token_ids(beyond, END), left_out_warning(beyond, END)) == ((), None)
    assert left_out_warning(replace(beyond, eos_token_ids=(2,)), END) is None


def test_a_worker_says_what_ends_its_answers(folder: Path) -> None:
    change(folder, eos_token_id=None)
    loaded, warnings = load(folder)
    assert (loaded.description.model.eos_token_ids, warnings) == ((4,), [])


def test_a_worker_warns_of_a_token_that_ends_no_answer_and_so_does_its_check(folder: Path) -> None:
    change(folder, generation={"eos_token_id": [2, 1]})
    loaded, [warning] = load(folder)
    assert loaded.description.model.eos_token_ids == (2, 1)
    assert warning == (
        "the tokenizer's eos_token '<|im_end|>' (4) ends no answer, only 2 and 1 do: "
        "add 4 to eos_token_id in generation_config.json if the model ends its answers with it"
    )
    command = [sys.executable, "-m", "worker_svc", "--check", "--model", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"worker: warning: {warning}\n")


@pytest.mark.parametrize("removed", ["tokenizer.json", "tokenizer_config.json"])
def test_a_folder_without_tokenizer_or_without_its_eos_token_gets_no_warning(folder: Path, removed: str) -> None:
    (folder / removed).unlink()
    change(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    (folder / "model.safetensors").unlink()
    write_tiny_model("llama_gqa", folder)
    assert check_folder(folder) == ()


def test_a_class_without_the_role_in_a_file_brings_its_own_token(folder: Path) -> None:
    write_tiny_model("llama_gqa", folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (folder / "generation_config.json").unlink(missing_ok=True)
    change(folder, eos_token_id=None)
    loaded, warnings = load(folder)
    assert (loaded.description.model.eos_token_ids, warnings) == ((1,), [])


def test_the_demo_model_gets_no_warning() -> None:
    assert check_folder(DEMO_MODEL) == ()
