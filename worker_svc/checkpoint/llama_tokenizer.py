"""Stages that `transformers` gives a tokenizer.json in a folder that declares LlamaTokenizer.

Of such a file its class takes vocabulary, merges, added tokens and what stands around a text. It makes the other stages
itself, by flags of tokenizer_config.json; files from before version 5 have others. Folders of other classes that Quire
serves keep the stages of their file. Knows no tokens of other files.
"""

import json
from pathlib import Path
from typing import Any

from worker_svc.checkpoint.json_file import JsonTable, read_optional_table
from worker_svc.checkpoint.model_folder import CONFIG_FILE

_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_SPACE = "▁"


def with_llama_stages(folder: Path, tokenizer_json: bytes) -> bytes:
    """The tokenizer.json that the folder's class makes of this one; the same if it is another class.

    Raises CheckpointError for a flag that is none.
    """
    settings = read_optional_table(folder, "tokenizer_config.json")
    if not _is_llamas(folder, settings) or b'"ByteLevel"' in tokenizer_json:  # LLaMA 3 declares this class by mistake
        return tokenizer_json
    document = json.loads(tokenizer_json)
    if "merges" not in document["model"]:
        return tokenizer_json
    adds_space = settings.flag("add_prefix_space", True) if "add_prefix_space" in settings else True
    is_legacy = settings.flag("legacy", False) if "legacy" in settings else False
    document |= _stages(adds_space=adds_space, is_legacy=is_legacy)
    document["model"] |= {"unk_token": None, "fuse_unk": True, "byte_fallback": True, "dropout": None}
    return json.dumps(document, ensure_ascii=False).encode()


def _is_llamas(folder: Path, settings: JsonTable) -> bool:
    """True if `transformers` takes the class: for some other model types, such as mistral, it takes none."""
    config = read_optional_table(folder, CONFIG_FILE)
    declared = settings if "tokenizer_class" in settings else config
    return config.raw("model_type") == "llama" and declared.raw("tokenizer_class") in _CLASSES


def _stages(*, adds_space: bool, is_legacy: bool) -> dict[str, Any]:
    scheme = "never" if not adds_space else "always" if is_legacy else "first"  # which parts of a text get a space
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": steps},
    }
