"""Reads what the scheduler needs to make its tokenizer, from a checkpoint's folder.

The scheduler has no model folder and no `transformers`; a folder with only the older vocabulary files is converted
here.
"""

from pathlib import Path

from tokenizers import Tokenizer

from worker_svc.checkpoint import MOST_TOKENIZER_BYTES
from worker_svc.checkpoint_error import CheckpointError
from worker_svc.description import TokenizerFiles
from worker_svc.folder_files import find_file, read_file, read_text
from worker_svc.json_file import MOST_BYTES, JsonTable, read_optional_table

_TOKENIZER_FILE = "tokenizer.json"
_OLDER_FILES = ("vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MOST_TOKEN_ID = 1 << 24


def read_tokenizer_files(folder: Path) -> TokenizerFiles | None:
    """The tokenizer of a checkpoint; None if the folder has none.

    Raises CheckpointError if it has one that cannot be read.
    """
    tokenizer_json = read_file(folder, _TOKENIZER_FILE, MOST_TOKENIZER_BYTES)
    if tokenizer_json is None:
        if not _has_older_files(folder):
            return None
        tokenizer_json = _convert(folder)
    config = read_optional_table(folder, "tokenizer_config.json")
    special = read_optional_table(folder, "special_tokens_map.json")
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, config),
        special_tokens={**_special_tokens(special), **_special_tokens(config)},
    )


def check_tokenizer(folder: Path) -> None:
    """Raises CheckpointError for what `read_tokenizer_files` would refuse, and for a tokenizer that is none."""
    tokenizer_json = read_file(folder, _TOKENIZER_FILE, MOST_TOKENIZER_BYTES)
    if tokenizer_json is not None:
        _parse(folder, tokenizer_json)
    config = read_optional_table(folder, "tokenizer_config.json")
    _chat_template(folder, config)
    _special_tokens(config)
    _special_tokens(read_optional_table(folder, "special_tokens_map.json"))


def _has_older_files(folder: Path) -> bool:
    return any(find_file(folder, name) is not None for name in _OLDER_FILES)


def _parse(folder: Path, tokenizer_json: bytes) -> Tokenizer:
    path = folder / _TOKENIZER_FILE
    try:
        tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise CheckpointError(f"{path} is no tokenizer ({error}): download the checkpoint again") from error
    if largest < 0:
        raise CheckpointError(f"{path} has no tokens: download the checkpoint again")
    if largest > _MOST_TOKEN_ID:
        raise CheckpointError(
            f"{path} has a token with id {largest}, and ids end at {_MOST_TOKEN_ID}: download the checkpoint again"
        )
    return tokenizer


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


def _chat_template(folder: Path, config: JsonTable) -> str | None:
    """From a file of its own, else from the tokenizer's config."""
    text = read_text(folder, "chat_template.jinja", MOST_BYTES)
    if text is not None:
        return text
    own = read_optional_table(folder, "chat_template.json")
    table = own if "chat_template" in own else config
    template = table.raw("chat_template")
    if template is None or isinstance(template, str):
        return template
    named = _named_templates(template)
    if named is None:
        table.refuse("chat_template", "must be a string, or a list of objects with name and template")
    return named.get("default")


def _named_templates(template: object) -> dict[str, str] | None:
    """Several templates by name; None if they are not spelled as such."""
    if not isinstance(template, list):
        return None
    named: dict[str, str] = {}
    for each in template:
        match each:
            case {"name": str(name), "template": str(text)}:
                named[name] = text
            case _:
                return None
    return named


def _special_tokens(table: JsonTable) -> dict[str, str]:
    """By role; a token is spelled as a string, or as an object with its content."""
    tokens: dict[str, str] = {}
    for role in _ROLES:
        match table.raw(role):
            case None:
                continue
            case str(content) | {"content": str(content)}:
                tokens[role] = content
            case _:
                table.refuse(role, "must be a string, or an object with a content")
    return tokens
