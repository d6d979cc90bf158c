"""Stages that `transformers` 5 gives a tokenizer.json in a folder of a class that makes them itself.

Of such a file the class takes vocabulary, merges, added tokens and, but for CodeLlamaTokenizer, what stands around a
text. It makes the other stages by flags of tokenizer_config.json; files from before version 5 may have others. A file
of another kind than its class, with bytes where the class has spaces or the other way round, keeps its stages: those
of the class lose its text. Files of other classes keep theirs, too. Knows no tokens of other files.
"""

import json
from collections.abc import Mapping
from typing import Any

from worker_svc.checkpoint.json_file import JsonTable
from worker_svc.checkpoint.tokenizer_class import TokenizerClass

_SPACE = "▁"
# Parts of a text that Qwen's vocabularies were made of, in this order: endings, words, digits, signs, spaces.
_QWEN_PARTS = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_NO_MARKS = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}


def is_byte_level(tokenizer_json: bytes) -> bool:
    """True for a vocabulary that spells bytes as characters; False for one that spells spaces as `▁`."""
    return b'"ByteLevel"' in tokenizer_json


def with_class_stages(
    tokenizer_json: bytes, found: TokenizerClass | None, settings: JsonTable, roles: Mapping[str, str]
) -> bytes:
    """The tokenizer.json that the class makes of this one; the same if it is another class, or has such stages.

    settings: tokenizer_config.json; roles: special tokens, which the vocabulary has. Raises CheckpointError for a flag
    that is none.
    """
    of_bytes = found in (TokenizerClass.GPT2, TokenizerClass.QWEN2)
    if found is None or found is TokenizerClass.BERT or of_bytes is not is_byte_level(tokenizer_json):
        return tokenizer_json
    document = json.loads(tokenizer_json)
    if "merges" not in document["model"]:
        return tokenizer_json
    if of_bytes:
        stages, model = _byte_stages(found, settings)
    else:
        stages, model = _space_stages(found, settings, roles)
    if found is TokenizerClass.CODE_LLAMA:  # puts its first token in front of every text
        stages["post_processor"] = _beginning(document, roles.get("bos_token"))
    merged = {**document, **stages, "model": {**document["model"], **model}}
    if _effective(merged) == _effective(document):
        return tokenizer_json
    return json.dumps(merged, ensure_ascii=False).encode()


def _space_stages(
    found: TokenizerClass, settings: JsonTable, roles: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stages, and options of the model, of a vocabulary that spells spaces as `▁`."""
    is_code = found is TokenizerClass.CODE_LLAMA
    adds_space = _flag(settings, "add_prefix_space", True)
    is_legacy = not is_code and _flag(settings, "legacy", False)
    scheme = "never" if not adds_space else "always" if is_legacy else "first"  # which parts of a text get a space
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space or is_code:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    stages = {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": steps},
    }
    unknown = roles.get("unk_token") if is_code else None
    return stages, {**_NO_MARKS, "unk_token": unknown, "fuse_unk": True, "byte_fallback": True}


def _byte_stages(found: TokenizerClass, settings: JsonTable) -> tuple[dict[str, Any], dict[str, Any]]:
    """Stages, and options of the model, of a vocabulary that spells bytes as characters."""
    is_qwens = found is TokenizerClass.QWEN2
    by_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": _flag(settings, "add_prefix_space", False),
        "trim_offsets": True,
        "use_regex": not is_qwens,
    }
    parts = {"type": "Split", "pattern": {"Regex": _QWEN_PARTS}, "behavior": "Isolated", "invert": False}
    stages = {
        "normalizer": {"type": "NFC"} if is_qwens else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [parts, by_bytes]} if is_qwens else by_bytes,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }
    return stages, {**_NO_MARKS, "unk_token": None, "fuse_unk": False, "byte_fallback": False}


def _beginning(document: dict[str, Any], bos: str | None) -> dict[str, Any] | None:
    """The stage that puts a token in front of a text; None without a token."""
    if bos is None:
        return None
    added = {each["content"]: each["id"] for each in document.get("added_tokens", ())}
    token_id = added.get(bos, document["model"]["vocab"].get(bos))
    if token_id is None:
        return document.get("post_processor")
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [first, texts[0]],
        "pair": [first, texts[0], {"SpecialToken": {"id": bos, "type_id": 1}}, texts[1]],
        "special_tokens": {bos: {"id": bos, "ids": [token_id], "tokens": [bos]}},
    }


def _flag(settings: JsonTable, key: str, default: bool) -> bool:
    return settings.flag(key, default) if key in settings else default


def _effective(document: Mapping[str, Any]) -> list[Any]:
    """Values that decide ids and text: flags of byte-level decoders do not, nor does the place of cut offsets."""
    decoder = document.get("decoder") or {}
    model = {key: value for key, value in document["model"].items() if value and key not in ("type", "vocab", "merges")}
    return [
        document.get("normalizer"),
        _without_offsets(document.get("pre_tokenizer")),
        decoder.get("type") if decoder.get("type") == "ByteLevel" else decoder,
        document.get("post_processor"),
        model,
    ]


def _without_offsets(stage: object) -> object:
    if isinstance(stage, list):
        return [_without_offsets(each) for each in stage]
    if isinstance(stage, dict):
        return {key: _without_offsets(value) for key, value in stage.items() if key != "trim_offsets"}
    return stage
