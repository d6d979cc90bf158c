"""Reads the files that the scheduler needs for its tokenizer, from a checkpoint's folder.

The scheduler has no model folder and no `transformers`: it gets one tokenizer.json that includes the additions of all
other files.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from worker_svc.checkpoint.added_tokens import SpecialTokens, complete_tokenizer, read_special_tokens
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.class_stages import is_byte_level, with_class_stages
from worker_svc.checkpoint.folder_files import find_file, read_file, read_text
from worker_svc.checkpoint.json_file import MOST_BYTES, read_optional_table, shown
from worker_svc.checkpoint.model_folder import MOST_TOKENIZER_BYTES, TEMPLATE_FILE, TOOLS_TEMPLATE_FILE
from worker_svc.checkpoint.older_tokenizers import convert_tokenizer
from worker_svc.checkpoint.tokenizer_class import TokenizerClass, default_roles, find_class

_TOKENIZER_FILE = "tokenizer.json"
_SETTINGS_FILE = "tokenizer_config.json"
_OLDER_FILES = ("vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_WORD_LIST = "vocab.txt"
_MOST_TOKEN_ID = 1 << 24


class EndToken(NamedTuple):
    """Special token that ends a text."""

    content: str
    token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """Complete tokenizer.json, the chat template, and special tokens by role."""

    tokenizer_json: bytes
    chat_template: str | None
    special_tokens: dict[str, str]
    end_token: EndToken | None = None

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.tokenizer_json)
        digest.update(json.dumps([self.chat_template, self.special_tokens], sort_keys=True).encode())
        return digest.hexdigest()


def read_tokenizer_files(folder: Path) -> TokenizerFiles | None:
    """The tokenizer of a checkpoint; None if the folder has none.

    Raises CheckpointError if it has one that cannot be read.
    """
    completed = _read_tokenizer(folder)
    if completed is None:
        if not _has_older_files(folder):
            return None
        completed = _converted(folder)
    return TokenizerFiles(
        tokenizer_json=completed.tokenizer_json,
        chat_template=_chat_template(folder),
        special_tokens=completed.tokens.by_role,
        end_token=completed.end_token,
    )


def check_tokenizer(folder: Path) -> EndToken | None:
    """Raises CheckpointError if `read_tokenizer_files` would, but does not convert older files.

    Returns the special token that ends a text; None if there is none, or only older files have it.
    """
    completed = _read_tokenizer(folder)
    if completed is None:
        _has_older_files(folder)
    _chat_template(folder)
    return None if completed is None else completed.end_token


class _Completed(NamedTuple):
    """Tokenizer with the tokens of all files."""

    tokenizer_json: bytes
    tokens: SpecialTokens
    end_token: EndToken | None


def _read_tokenizer(folder: Path) -> _Completed | None:
    """The tokenizer.json with the tokens of other files and the stages of its class; None if there is none."""
    tokens = read_special_tokens(folder)
    tokenizer_json = read_file(folder, _TOKENIZER_FILE, MOST_TOKENIZER_BYTES)
    if tokenizer_json is None:
        return None
    try:
        tokenizer = _parse(folder, tokenizer_json)
        settings = read_optional_table(folder, _SETTINGS_FILE)
        found = find_class(folder, settings, is_byte_level=is_byte_level(tokenizer_json))
        tokens = _with_defaults(tokens, found, tokenizer)
        staged_json = with_class_stages(tokenizer_json, found, settings, tokens.by_role)
        if staged_json is not tokenizer_json:
            tokenizer = _parse(folder, staged_json)
        if complete_tokenizer(tokenizer, tokens):
            staged_json = str(tokenizer.to_str()).encode()
        return _Completed(staged_json, tokens, _end_token(tokenizer, tokens))
    except (CheckpointError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic of the Rust library is no Exception
        raise CheckpointError(
            f"{folder / _TOKENIZER_FILE} does not accept the tokens of tokenizer_config.json ({shown(str(error))}): "
            "download the checkpoint again"
        ) from error


def _converted(folder: Path) -> _Completed:
    """The tokenizer of older files, to which the conversion has added all tokens."""
    tokenizer_json = convert_tokenizer(folder)
    tokenizer = _parse(folder, tokenizer_json)
    found = find_class(folder, read_optional_table(folder, _SETTINGS_FILE), is_byte_level=False)
    tokens = _with_defaults(read_special_tokens(folder), found, tokenizer)
    return _Completed(tokenizer_json, tokens, _end_token(tokenizer, tokens))


def _with_defaults(tokens: SpecialTokens, found: TokenizerClass | None, tokenizer: Tokenizer) -> SpecialTokens:
    """The tokens of the files, and those that the class has by default."""
    return tokens.with_defaults(default_roles(found), lambda token: tokenizer.token_to_id(token) is not None)


def _end_token(tokenizer: Tokenizer, tokens: SpecialTokens) -> EndToken | None:
    """The token with the role `eos_token`; None if there is none, or it has no id."""
    content = tokens.by_role.get("eos_token")
    token_id = None if content is None else tokenizer.token_to_id(content)
    return None if content is None or token_id is None else EndToken(content, token_id)


def _has_older_files(folder: Path) -> bool:
    """True if the folder has older vocabulary files. Raises CheckpointError for one that is no regular file in it.

    A vocab.txt counts where a class is declared that reads it: to others it is any file, and no vocabulary.
    """
    names = list(_OLDER_FILES)
    settings = read_optional_table(folder, _SETTINGS_FILE)
    if find_class(folder, settings, is_byte_level=False) is TokenizerClass.BERT:
        names.append(_WORD_LIST)
    return any(find_file(folder, name) is not None for name in names)


def _parse(folder: Path, tokenizer_json: bytes) -> Tokenizer:
    path = folder / _TOKENIZER_FILE
    try:
        tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of the Rust library is no Exception
        raise CheckpointError(f"{path} is no tokenizer ({shown(str(error))}): download the checkpoint again") from error
    if largest < 0:
        raise CheckpointError(f"{path} has no tokens: download the checkpoint again")
    if largest > _MOST_TOKEN_ID:
        raise CheckpointError(
            f"{path} has a token with id {largest}, and ids end at {_MOST_TOKEN_ID}: download the checkpoint again"
        )
    return tokenizer


def _chat_template(folder: Path) -> str | None:
    """The chat template, from files of its own, else from the tokenizer's config."""
    usual, with_tools = (read_text(folder, name, MOST_BYTES) for name in (TEMPLATE_FILE, TOOLS_TEMPLATE_FILE))
    if usual is not None or with_tools is not None:
        return _by_tools(usual, with_tools)
    own = read_optional_table(folder, "chat_template.json")
    table = own if "chat_template" in own else read_optional_table(folder, _SETTINGS_FILE)
    template = table.raw("chat_template")
    if template is None or isinstance(template, str):
        return template
    named = _named_templates(template)
    if named is None:
        table.refuse("chat_template", "must be a string, or a list of objects with name and template")
    return _by_tools(named.get("default"), named.get("tool_use"))


def _by_tools(usual: str | None, with_tools: str | None) -> str | None:
    """One template that is the second where there are tools, as `transformers` chooses it, and else the first."""
    if usual is None or with_tools is None:
        return usual or with_tools
    # Jinja drops the newline behind a tag and the one that ends a file; an empty piece keeps it from trimming more.
    usual, with_tools = ("\n" + each.removesuffix("\n") + '{{ "" }}' for each in (usual, with_tools))
    return f"{{% if tools is none %}}{usual}{{% else %}}{with_tools}{{% endif %}}"


def _named_templates(template: object) -> dict[str, str] | None:
    """Several templates by name; None if this is no list of named templates."""
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
