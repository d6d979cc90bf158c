"""Tokenizers as a worker sends them, against `AutoTokenizer` on the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.scheduler.text_tokenizers import byte_level_json
from worker_svc.checkpoint_error import CheckpointError
from worker_svc.tokenizer_files import check_tokenizer, read_tokenizer_files

TEXTS = (
    "The quick brown fox",
    "  two spaces, <extra>and<more> tokens <|tool|> here </s>",
    "<s>the<extra> dog</s><|im_end|>",
    "你好 <image> é",
    "",
)
EXTRA = {"content": "<extra>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
# By name: files beside tokenizer.json.
FOLDERS: dict[str, dict[str, Any]] = {
    "nothing beside it": {},
    "added_tokens.json": {"added_tokens": {"<more>": 481, "<extra>": 480}},
    "added_tokens.json, one of them special": {
        "added_tokens": {"<extra>": 480, "<more>": 481},
        "special_tokens_map": {"additional_special_tokens": ["<more>"]},
    },
    "additional_special_tokens": {"tokenizer_config": {"additional_special_tokens": ["<extra>", "<more>"]}},
    "extra_special_tokens": {"tokenizer_config": {"extra_special_tokens": ["<extra>", "<more>"]}},
    "extra_special_tokens by name": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<image>"}}},
    "a role of its own": {"tokenizer_config": {"tool_token": "<|tool|>"}},
    "roles that no vocabulary has": {"tokenizer_config": {"pad_token": "<more>", "unk_token": "<extra>"}},
    "added_tokens_decoder": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                "480": {**EXTRA, "special": True},
                "481": {**EXTRA, "content": "<more>", "lstrip": True, "special": False},
            }
        }
    },
    "roles in both files": {
        "tokenizer_config": {"eos_token": "<|im_end|>", "bos_token": "<s>"},
        "special_tokens_map": {"eos_token": {"content": "</s>", "lstrip": False}},
    },
    "ends that tokenizer.json has otherwise": {
        "tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
    },
}


def write(folder: Path, files: dict[str, Any]) -> Path:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **files.get("tokenizer_config", {})}
    for name, content in {**files, "tokenizer_config": config}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def compare(folder: Path) -> None:
    """Ids of texts, texts of ids, roles."""
    files = read_tokenizer_files(folder)
    assert files is not None
    ours, theirs = Tokenizer.from_buffer(files.tokenizer_json), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special).ids
            assert ids == theirs.encode(text, add_special_tokens=special), text
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
                ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
            )
    roles = {role: getattr(theirs, role) for role in ("bos_token", "eos_token", "pad_token", "unk_token")}
    given = {role: token for role, token in roles.items() if token is not None}
    assert {role: files.special_tokens.get(role) for role in given} == given


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_of_all_files_count_as_they_do_for_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_level_json())
    compare(write(tmp_path, FOLDERS[name]))


def test_a_sentencepiece_model_alone_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"whatever it is")
    for act in (read_tokenizer_files, check_tokenizer):
        with pytest.raises(CheckpointError, match=r"tokenizer\.model alone, and sentencepiece.* is not installed"):
            act(tmp_path)
