"""A tokenizer.json for grammars: its tokens are the model's, spell the bytes of a text, and a "▁" in them is a space.

llguidance takes the tokens of a text that a grammar forces from the tokenizer. A stage that changes texts, as Qwen's
NFC, gives tokens of another text, which the grammar then does not allow. So such stages are left out. So are added
tokens beyond the model's embedding, which it does not read at all. Knows no grammar.
"""

import json
from typing import Any

_ADDED = "added_tokens"
_PARTS = (_ADDED, "normalizer", "pre_tokenizer", "decoder")
_SPELLING = ("Prepend", "Replace")  # normalizers that write spaces as the vocabulary does
_DECODER = json.JSONDecoder()
_SPACES = " \t\r\n"

Stage = dict[str, Any] | None


def faithful_tokenizer(tokenizer_json: bytes, vocab_size: int) -> bytes:
    """The same without stages that change texts, and without added tokens from id `vocab_size` on.

    What cannot be read stays as it is, for its reader to say so.
    """
    try:
        text = tokenizer_json.decode()
        for begin, end, name, part in reversed(_parts(text)):
            changed = _known(part, vocab_size) if name == _ADDED else _faithful(name, part)
            if changed != part:
                text = text[:begin] + json.dumps(changed) + text[end:]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return tokenizer_json
    return text.encode()


def _parts(text: str) -> list[tuple[int, int, str, Any]]:
    """Places of parts that may change, with names and contents. Parses no more than it has to: the file is large."""
    found: list[tuple[int, int, str, Any]] = []
    place = _behind(text, 0, "{")
    while len(found) < len(_PARTS) and text[place] != "}":
        name, place = _DECODER.raw_decode(text, place)
        begin = _behind(text, place, ":")
        value, end = _DECODER.raw_decode(text, begin)
        if name in _PARTS:
            found.append((begin, end, name, value))
        place = _behind(text, end, ",") if text[_skipped(text, end)] == "," else _skipped(text, end)
    return found


def _behind(text: str, place: int, mark: str) -> int:
    place = _skipped(text, place)
    if text[place] != mark:
        raise ValueError(f"no {mark}")
    return _skipped(text, place + 1)


def _skipped(text: str, place: int) -> int:
    while text[place] in _SPACES:
        place += 1
    return place


def _known(added: list[dict[str, Any]], vocab_size: int) -> list[dict[str, Any]]:
    return [each for each in added if each["id"] < vocab_size]


def _faithful(name: str, stage: Stage) -> Stage:
    if stage is None:
        return None
    if name == "normalizer":
        return _spelling_only(stage)
    if name == "pre_tokenizer":
        return _without_prefix_space(stage)
    return _with_read_spaces(stage)


def _spelling_only(stage: dict[str, Any]) -> Stage:
    if stage["type"] == "Sequence":
        return {**stage, "normalizers": [each for each in stage["normalizers"] if _spelling_only(each)]}
    is_spelling = stage["type"] in _SPELLING and stage.get("pattern") in (None, {"String": " "})
    return stage if is_spelling else None


def _without_prefix_space(stage: dict[str, Any]) -> dict[str, Any]:
    if stage["type"] == "Sequence":
        return {**stage, "pretokenizers": [_without_prefix_space(each) for each in stage["pretokenizers"]]}
    return {**stage, "add_prefix_space": False} if stage["type"] == "ByteLevel" else stage


def _with_read_spaces(stage: dict[str, Any]) -> dict[str, Any]:
    """Decoders that llguidance reads: it finds out what means a space from `Replace` alone."""
    if stage["type"] != "Sequence":
        return stage
    return {**stage, "decoders": [_as_replacement(each) for each in stage["decoders"]]}


def _as_replacement(decoder: dict[str, Any]) -> dict[str, Any]:
    if decoder["type"] != "Metaspace":
        return decoder
    return {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
