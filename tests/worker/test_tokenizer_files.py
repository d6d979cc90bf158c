"""Tokenizer files that a worker finds in a checkpoint's folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from scheduler_svc.text.template_program import CompiledTemplate
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.tokenizer_files import read_tokenizer_files

TOKENIZER = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3}, [])).to_str().encode()


def write(folder: Path, **files: object) -> Path:
    """Writes files, given by name without suffix, as JSON."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    return tmp_path


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert read_tokenizer_files(tmp_path) is None


def test_a_folder_with_only_tokenizer_json_has_no_template_and_no_special_tokens(folder: Path) -> None:
    files = read_tokenizer_files(folder)
    assert files is not None
    assert (files.tokenizer_json, files.chat_template, files.special_tokens) == (TOKENIZER, None, {})


def test_special_tokens_come_from_both_files_plain_or_as_objects_and_their_own_file_wins(folder: Path) -> None:
    write(
        folder,
        special_tokens_map={"bos_token": "<old>", "unk_token": {"content": "<unk>", "lstrip": False}},
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "other": "x"},
    )
    files = read_tokenizer_files(folder)
    assert files is not None
    assert files.special_tokens == {"bos_token": "<old>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("template", ["T", [{"name": "default", "template": "T"}]])
def test_a_chat_template_may_stand_in_the_tokenizers_config(folder: Path, template: object) -> None:
    files = read_tokenizer_files(write(folder, tokenizer_config={"chat_template": template}))
    assert files is not None
    assert files.chat_template == "T"


@pytest.mark.parametrize("ends", ["", "\n", "  \n\n", "{% if true %}\n{% endif %}\n"])
@pytest.mark.parametrize("tools", [None, [{"name": "f"}]])
def test_a_template_for_tools_is_used_where_there_are_some(folder: Path, tools: Any, ends: str) -> None:
    named = {
        "tool_use": "  {% for each in tools %}\n{{ each.name }}\n{% endfor %}" + ends,
        "default": "\n  {{ messages | length }} " + ends,
    }
    table = [{"name": name, "template": template} for name, template in named.items()]
    files = read_tokenizer_files(write(folder, tokenizer_config={"chat_template": table}))
    assert files is not None and files.chat_template is not None
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(TOKENIZER.decode()), chat_template=named)  # type: ignore[no-untyped-call]
    chat = [{"role": "user", "content": "Hi"}]
    expected = theirs.apply_chat_template(chat, tools=tools, tokenize=False)
    template = CompiledTemplate(files.chat_template, {})
    assert template.render(chat, add_generation_prompt=False, tools=json.dumps(tools) if tools else "") == expected


@pytest.mark.parametrize("tools", [None, [{"name": "f"}]])
def test_templates_that_transformers_saved_as_files_are_those_that_it_reads(folder: Path, tools: Any) -> None:
    write(folder, tokenizer_config={"chat_template": "old"})
    named = {"default": "{{ messages | length }}", "tool_use": "{{ tools | length }} tools", "rag": "documents"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(TOKENIZER.decode()), chat_template=named)  # type: ignore[no-untyped-call]
    theirs.save_pretrained(str(folder))
    files = read_tokenizer_files(folder)
    assert files is not None and files.chat_template is not None
    chat = [{"role": "user", "content": "Hi"}]
    expected = theirs.apply_chat_template(chat, tools=tools, tokenize=False)
    template = CompiledTemplate(files.chat_template, {})
    assert template.render(chat, add_generation_prompt=False, tools=json.dumps(tools) if tools else "") == expected


def test_a_chat_template_of_its_own_file_comes_first(folder: Path) -> None:
    write(folder, tokenizer_config={"chat_template": "old"}, chat_template={"chat_template": "newer"})
    files = read_tokenizer_files(folder)
    assert files is not None
    assert files.chat_template == "newer"
    (folder / "chat_template.jinja").write_text("newest")
    files = read_tokenizer_files(folder)
    assert files is not None
    assert files.chat_template == "newest"


def test_the_fingerprint_is_of_all_that_is_sent(folder: Path) -> None:
    before = read_tokenizer_files(folder)
    same = read_tokenizer_files(folder)
    after = read_tokenizer_files(write(folder, tokenizer_config={"eos_token": "</s>"}))
    assert before is not None
    assert same is not None
    assert after is not None
    assert before.fingerprint == same.fingerprint != after.fingerprint


@pytest.mark.long
def test_older_vocabulary_files_are_converted(tmp_path: Path) -> None:
    vocab = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    write(tmp_path, vocab=vocab, config={"model_type": "gpt2"}, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    files = read_tokenizer_files(tmp_path)
    assert files is not None
    tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
    assert isinstance(tokenizer.model, models.BPE)
    assert tokenizer.encode("abba").ids == [3, 2, 1]


@pytest.mark.long
def test_a_tokenizer_that_cannot_be_converted_says_what_to_add(tmp_path: Path) -> None:
    write(tmp_path, vocab=["no", "vocabulary"], config={"model_type": "gpt2"})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(CheckpointError, match=r"add a tokenizer\.json to the folder"):
        read_tokenizer_files(tmp_path)
