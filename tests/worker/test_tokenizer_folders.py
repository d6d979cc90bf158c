"""Tokenizers as a worker sends them, against `AutoTokenizer` on the same folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer, Qwen2Tokenizer
from transformers.utils import sentencepiece_model_pb2_new

from scheduler_svc.text.tokenizer import ModelTokenizer
from tests.scheduler.text_tokenizers import byte_fallback_json, byte_level_json, metaspace_json
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.class_stages import with_class_stages
from worker_svc.checkpoint.json_file import JsonTable
from worker_svc.checkpoint.tokenizer_class import TokenizerClass
from worker_svc.checkpoint.tokenizer_files import EndToken, check_tokenizer, read_tokenizer_files

TEXTS = (
    "The quick brown fox",
    "  two spaces, <extra>and<more> tokens <|tool|> here </s>",
    "<s>the<extra> dog</s><|im_end|>",
    "你好 <image> é",
    " a space, and </s> another spaced  one",
    "In 2023, the 15 dogs e\u0301 don't\n\n▁<PRE> jump",
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


CODE_TOKENS = ["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>", "<FILL_ME>"]


def with_digits() -> bytes:
    """Byte-level tokenizer whose file parts each digit from the text around it, as GPT-2's class does not."""
    tokenizer = Tokenizer.from_buffer(byte_level_json())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer.to_str().encode()


KINDS: dict[str, Callable[[], bytes]] = {
    "fallback": byte_fallback_json,
    "metaspace": metaspace_json,
    "bytes": byte_level_json,
    "digits": with_digits,
}


# Of a model type, with a tokenizer.json of a kind.
@pytest.mark.parametrize(
    ("model_type", "kind", "settings"),
    [
        ("llama", "fallback", {"tokenizer_class": "LlamaTokenizer"}),
        ("llama", "fallback", {"tokenizer_class": "LlamaTokenizer", "legacy": True}),
        ("llama", "fallback", {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": None}),
        ("llama", "fallback", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
        ("llama", "fallback", {"tokenizer_class": "LlamaTokenizer", "eos_token": "<|im_end|>", "bos_token": None}),
        ("llama", "fallback", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("llama", "fallback", {}),
        ("mistral", "fallback", {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
        ("mistral", "fallback", {"tokenizer_class": "CodeLlamaTokenizer"}),
        ("olmo2", "digits", {"tokenizer_class": "GPT2Tokenizer"}),
        ("qwen3", "fallback", {"tokenizer_class": "LlamaTokenizerFast"}),
        ("qwen3", "metaspace", {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}),
        ("gpt2", "fallback", {"tokenizer_class": "LlamaTokenizer"}),
        (None, "fallback", {"tokenizer_class": "LlamaTokenizer"}),
        ("llama", "fallback", {"tokenizer_class": "CodeLlamaTokenizer"}),
        ("llama", "fallback", {"tokenizer_class": "CodeLlamaTokenizerFast", "add_prefix_space": False, "legacy": True}),
        ("llama", "fallback", {"tokenizer_class": "CodeLlamaTokenizer", "add_bos_token": False, "add_eos_token": True}),
        (
            "llama",
            "metaspace",
            {"tokenizer_class": "CodeLlamaTokenizer", "bos_token": "</s>", "eot_token": "<|im_end|>"},
        ),
        ("gpt2", "bytes", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
        ("gpt2", "digits", {}),
        ("opt", "digits", {"add_prefix_space": True}),
        ("llama", "digits", {"tokenizer_class": "GPT2Tokenizer", "bos_token": None}),
        ("llama", "digits", {"tokenizer_class": "GPT2TokenizerFast", "eos_token": "</s>"}),
        ("llama", "digits", {"tokenizer_class": "LlamaTokenizerFast"}),
        ("llama", "digits", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("llama", "digits", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("qwen2", "bytes", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("qwen2", "digits", {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True}),
        ("qwen2", "digits", {"tokenizer_class": "LlamaTokenizerFast", "pad_token": None, "unk_token": "<s>"}),
        ("qwen3", "digits", {"eos_token": "<|im_end|>"}),
        ("qwen3", "digits", {"tokenizer_class": "TokenizersBackend"}),
    ],
)
def test_a_folder_has_the_stages_and_special_tokens_of_its_class(
    model_type: str | None, kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_buffer(KINDS[kind]())
    tokenizer.add_tokens([AddedToken("<more>", lstrip=True), AddedToken(" spaced ", normalized=True)])
    if str(settings.get("tokenizer_class")).startswith("CodeLlama"):
        tokenizer.add_special_tokens(CODE_TOKENS)
    elif kind in ("bytes", "digits"):
        tokenizer.add_special_tokens(["<|endoftext|>"])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    config = {} if model_type is None else {"config": {"model_type": model_type}}
    compare(write(tmp_path, {**config, "tokenizer_config": {"tokenizer_class": None, **settings}}))


def test_a_role_that_another_file_sets_has_no_default(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_fallback_json())
    config = {"tokenizer_class": "LlamaTokenizer", "unk_token": None}
    special = {"bos_token": "<|im_start|>"}
    folder = write(
        tmp_path, {"config": {"model_type": "llama"}, "tokenizer_config": config, "special_tokens_map": special}
    )
    compare(folder)
    files = read_tokenizer_files(folder)
    assert files is not None
    assert files.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "</s>"}
    assert files.end_token == EndToken("</s>", 2)


def test_a_default_token_counts_where_the_vocabulary_has_it_and_becomes_special(tmp_path: Path) -> None:
    document = json.loads(byte_level_json())
    document["model"]["vocab"]["<|endoftext|>"] = 480
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    config = {"tokenizer_class": "GPT2Tokenizer"}
    compare(write(tmp_path, {"config": {"model_type": "gpt2"}, "tokenizer_config": config}))
    (tmp_path / "tokenizer.json").write_bytes(byte_level_json())
    files = read_tokenizer_files(tmp_path)
    assert files is not None
    assert files.special_tokens == {}
    assert files.end_token is None


def test_a_tokenizer_that_has_the_stages_of_its_class_is_sent_as_it_is(tmp_path: Path) -> None:
    """Saved by Qwen2's own class, it is not parsed twice: such files have ten megabytes."""
    vocabulary = json.loads(byte_level_json())["model"]["vocab"]
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "unk_token": None, "pad_token": None}
    theirs = Qwen2Tokenizer(vocab={**vocabulary, "<|endoftext|>": len(vocabulary)}, merges=[])
    document = json.loads(theirs.backend_tokenizer.to_str())
    document["pre_tokenizer"]["pretokenizers"][1]["trim_offsets"] = False  # as in the files of Qwen2.5
    document["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    folder = write(tmp_path, {"config": {"model_type": "qwen2"}, "tokenizer_config": config})
    compare(folder)
    content = (tmp_path / "tokenizer.json").read_bytes()
    assert with_class_stages(content, TokenizerClass.QWEN2, JsonTable("settings", config), {}) is content


@pytest.mark.parametrize("kind", ["fallback", "metaspace"])
@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_a_file_that_its_class_would_take_the_text_from_keeps_its_stages(kind: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(KINDS[kind]())
    config = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    files = read_tokenizer_files(write(tmp_path, {"config": {"model_type": "llama"}, "tokenizer_config": config}))
    assert files is not None
    ours, theirs = Tokenizer.from_buffer(files.tokenizer_json), Tokenizer.from_buffer(KINDS[kind]())
    assert [ours.encode(text).ids for text in TEXTS] == [theirs.encode(text).ids for text in TEXTS]


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


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "play", "##ing", "now", ",", ".", "dog", "##s"]


def write_words(folder: Path, model_type: str, name: str) -> Path:
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    return write(folder, {"config": {"model_type": model_type}, "tokenizer_config": {"tokenizer_class": name}})


@pytest.mark.long
def test_a_list_of_words_is_read_by_berts_class_and_its_tokens_are_the_text(tmp_path: Path) -> None:
    folder = write_words(tmp_path, "gpt2", "BertTokenizer")
    check_tokenizer(folder)
    files = read_tokenizer_files(folder)
    assert files is not None
    compare(folder)
    tokenizer = ModelTokenizer(files.tokenizer_json, "", files.special_tokens)
    ids = tokenizer.encode("the quick dogs, playing now.", add_special_tokens=False)
    assert b"".join(tokenizer.pieces(ids)) == b" the quick dogs, playing now."


@pytest.mark.parametrize(
    ("model_type", "name"), [("gpt2", "GPT2Tokenizer"), ("mistral", "BertTokenizer"), ("qwen2", "BertTokenizer")]
)
def test_a_list_of_words_is_no_vocabulary_of_another_class(model_type: str, name: str, tmp_path: Path) -> None:
    folder = write_words(tmp_path, model_type, name)
    check_tokenizer(folder)
    assert read_tokenizer_files(folder) is None


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
