"""Tokenizers as a worker sends them, against `AutoTokenizer` on the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer
from transformers.utils import sentencepiece_model_pb2_new

from tests.scheduler.text_tokenizers import byte_fallback_json, byte_level_json
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.tokenizer_files import check_tokenizer, read_tokenizer_files

TEXTS = (
    "The quick brown fox",
    "  two spaces, <extra>and<more> tokens <|tool|> here </s>",
    "<s>the<extra> dog</s><|im_end|>",
    "你好 <image> é",
    " a space, and </s> another spaced  one",
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
    assert files.special_tokens == theirs.special_tokens_map


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_of_all_files_count_as_they_do_for_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_level_json())
    compare(write(tmp_path, FOLDERS[name]))


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {}),
        ("llama", {"legacy": True}),
        ("llama", {"legacy": False, "add_prefix_space": None}),
        ("llama", {"add_prefix_space": False}),
        ("llama", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("mistral", {"legacy": False}),
    ],
)
def test_a_folder_of_llamas_class_has_the_stages_of_that_class(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_buffer(byte_fallback_json())
    tokenizer.add_tokens([AddedToken("<more>", lstrip=True), AddedToken(" spaced ", normalized=True)])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "LlamaTokenizer", **roles, **settings}
    compare(write(tmp_path, {"config": {"model_type": model_type}, "tokenizer_config": config}))


def test_a_file_that_llamas_class_cannot_have_made_keeps_its_stages(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_level_json())
    config = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    compare(write(tmp_path, {"config": {"model_type": "llama"}, "tokenizer_config": config}))


def test_a_flag_of_llamas_class_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_fallback_json())
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": "no"}
    folder = write(tmp_path, {"config": {"model_type": "llama"}, "tokenizer_config": config})
    with pytest.raises(CheckpointError, match=r"legacy is .* must be true or false"):
        check_tokenizer(folder)


def sentencepiece_model() -> bytes:
    """A BPE model with byte fallback and a dummy prefix, as LLaMA's is."""
    schema: Any = sentencepiece_model_pb2_new
    model = schema.ModelProto()
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["he", "ll", "▁hello", "hell", "hello", "▁w", "or", "▁wor", "ld", "▁world", *"▁abcdefghijklmnopqrstuvwxyz"]
    for kind, pieces in ((2, ["<unk>"]), (3, ["<s>", "</s>"]), (6, bytes_of), (4, ["<user>"]), (1, words)):
        for piece in pieces:
            model.pieces.add(piece=piece, type=kind, score=-float(words.index(piece)) if kind == 1 else 0.0)
    return bytes(model.SerializeToString())


@pytest.mark.long
def test_a_sentencepiece_model_alone_is_converted_as_transformers_does(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **roles}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    check_tokenizer(tmp_path)
    files = read_tokenizer_files(tmp_path)
    assert files is not None
    tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
    for text, tokens in {
        "hello world": ["▁hello", "▁world"],
        "hello  world\n": ["▁hello", "▁", "▁world", "<0x0A>"],
        "é한": ["▁", "<0xC3>", "<0xA9>", "<0xED>", "<0x95>", "<0x9C>"],
        "<user>hello": ["<user>", "hello"],
        "</s>x": ["</s>", "x"],
        "": [],
    }.items():
        encoded = tokenizer.encode(text)
        assert encoded.tokens == ["<s>", *tokens]
        assert tokenizer.decode(encoded.ids) == text.removeprefix("</s>")


@pytest.mark.long
def test_a_sentencepiece_model_that_cannot_be_read_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"whatever it is")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        CheckpointError, match=r"cannot be converted to tokenizer\.json .*add a tokenizer\.json"
    ) as caught:
        read_tokenizer_files(tmp_path)
    assert str(caught.value).isprintable()
