"""Reads what the scheduler needs to make its tokenizer, from a checkpoint's folder.

The scheduler has no model folder and no `transformers`; a folder with only the older vocabulary files is converted
here.
"""

from pathlib import Path
from typing import Any

from worker_svc.checkpoint import CheckpointError, read_json
from worker_svc.description import TokenizerFiles

_TOKENIZER_FILE = "tokenizer.json"
_OLDER_FILES = ("vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_tokenizer_files(folder: Path) -> TokenizerFiles | None:
    """The tokenizer of a checkpoint; None if the folder has none.

    Raises CheckpointError if it has one that cannot be read.
    """
    if (folder / _TOKENIZER_FILE).is_file():
        tokenizer_json = (folder / _TOKENIZER_FILE).read_bytes()
    elif any((folder / name).is_file() for name in _OLDER_FILES):
        tokenizer_json = _convert(folder)
    else:
        return None
    config = _read_optional(folder / "tokenizer_config.json")
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, config),
        special_tokens=_special_tokens({**_read_optional(folder / "special_tokens_map.json"), **config}),
    )


def _convert(folder: Path) -> bytes:
    # Here, because it takes seconds and few folders need it.
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        converted: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # whatever a converter raises: each tokenizer has its own
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be converted to {_TOKENIZER_FILE} ({error}): "
            f"add a {_TOKENIZER_FILE} to the folder"
        ) from error
    return converted.encode()


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_optional(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):  # several by name
        by_name = {each["name"]: each["template"] for each in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {role: config.get(role) for role in _ROLES}
    contents = {role: token["content"] if isinstance(token, dict) else token for role, token in tokens.items()}
    return {role: content for role, content in contents.items() if isinstance(content, str)}


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
