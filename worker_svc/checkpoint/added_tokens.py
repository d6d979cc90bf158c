"""Tokens that a model folder adds to its tokenizer.json.

They are in tokenizer_config.json, special_tokens_map.json and added_tokens.json, with the precedence of `transformers`:
if tokenizer_config.json has `added_tokens_decoder`, it wins over the two other files, which are older.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tokenizers import AddedToken, Tokenizer

from worker_svc.checkpoint.json_file import JsonTable, read_optional_table

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_DECODER = "added_tokens_decoder"
_MOST_ID = 1 << 24
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Tokens in the files beside tokenizer.json. Added tokens get their ids in this order."""

    by_role: dict[str, str]  # the usual roles and a model's own: variables of its chat template
    listed: tuple[AddedToken, ...]  # they replace those of tokenizer.json
    named: tuple[AddedToken, ...]  # by a role, or as an extra one; added if tokenizer.json lacks them
    set_roles: frozenset[str]  # by a file, some of them to null: to no token

    def with_defaults(self, roles: Mapping[str, str], has_token: Callable[[str], bool]) -> Self:
        """Add the default tokens of roles that no file sets, where the vocabulary has them."""
        added = {role: token for role, token in roles.items() if role not in self.set_roles and has_token(token)}
        for token in self.listed:
            token.special = token.special or token.content in added.values()
        present = {token.content for token in self.named}
        named = [AddedToken(token, special=True) for token in dict.fromkeys(added.values()) if token not in present]
        return replace(self, by_role={**self.by_role, **added}, named=(*self.named, *named))


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Read the special tokens of a folder. Raises CheckpointError for a value that is not a token."""
    config = read_optional_table(folder, "tokenizer_config.json")
    special_map = read_optional_table(folder, "special_tokens_map.json")
    has_decoder = _DECODER in config
    tables = (special_map, config) if has_decoder else (config, special_map)  # the later one wins
    roles = {role: token for table in tables for role, token in _roles(table).items()}
    extra = [token for table in tables for token in _extra(table)]
    named = {token.content: token for token in (*extra, *reversed(roles.values()))}  # a role wins
    special = {token.content for token in (*roles.values(), *_extra(config), *_extra(special_map, _LISTS[:1]))}
    listed = _decoder(config) if has_decoder else _added_file(folder, special)
    for token in listed:
        token.special = token.special or token.content in {each.content for each in roles.values()}
    return SpecialTokens(
        by_role={role: token.content for role, token in roles.items()},
        listed=tuple(listed),
        named=tuple(dict.fromkeys([*(named[each.content] for each in roles.values()), *named.values()])),
        set_roles=frozenset(key for table in tables for key in table.keys) | roles.keys(),
    )


def complete_tokenizer(tokenizer: Tokenizer, tokens: SpecialTokens) -> bool:
    """Adds the missing tokens. Returns True if there were any."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [token for token in tokens.listed if not _is_same(token, known.get(token.content))]
    present = {*known, *(token.content for token in tokens.listed)}
    missing += [token for token in tokens.named if token.content not in present]
    if missing:
        tokenizer.add_tokens(missing)
    return bool(missing)


def _roles(table: JsonTable) -> dict[str, AddedToken]:
    """Tokens by role: the usual roles, and a model's own, such as `image_token`."""
    own = [key for key in table.keys if key.endswith("_token") and isinstance(table.raw(key), str | dict)]
    found: dict[str, AddedToken] = {}
    for role in dict.fromkeys([*ROLES, *own]):
        if role in table:
            found[role] = _token(table, role, table.raw(role))
    named = table.raw("extra_special_tokens")
    if isinstance(named, dict):
        found.update({name: _token(table, "extra_special_tokens", token) for name, token in named.items()})
    return found


def _extra(table: JsonTable, keys: Sequence[str] = _LISTS) -> list[AddedToken]:
    key = next((each for each in keys if table.raw(each)), None)
    if key is None or isinstance(table.raw(key), dict):
        return []
    listed = table.raw(key)
    if not isinstance(listed, list):
        table.refuse(key, "must be a list of tokens")
    return [_token(table, key, each) for each in listed]


def _decoder(config: JsonTable) -> list[AddedToken]:
    """Tokens of `added_tokens_decoder`, in the order of their ids."""
    table = config.table(_DECODER)
    assert table is not None, "it is there"
    for key in table.keys:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) <= _MOST_ID):
            table.refuse(key, f"the keys must be token ids, from 0 to {_MOST_ID}")
    return [_token(table, key, table.raw(key), is_special=False) for key in sorted(table.keys, key=int)]


def _added_file(folder: Path, special: set[str]) -> list[AddedToken]:
    """Tokens of added_tokens.json, which has an id for each, in the order of their ids."""
    table = read_optional_table(folder, "added_tokens.json")
    by_id = sorted((table.integer(token, least=0, most=_MOST_ID), token) for token in table.keys)
    return [AddedToken(token, special=token in special, normalized=token not in special) for _, token in by_id]


def _token(table: JsonTable, key: str, value: object, *, is_special: bool = True) -> AddedToken:
    """A token, from a string, or from an object with its content and flags."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        table.refuse(key, "must be a string, or an object with a content")
    flags = JsonTable(f"{table.place}: {key}", value)
    given = {name: flags.flag(name, False) for name in _FLAGS if name in flags}
    return AddedToken(value["content"], **{"special": is_special, **given})


def _is_same(token: AddedToken, known: AddedToken | None) -> bool:
    return known is not None and all(getattr(token, name) == getattr(known, name) for name in _FLAGS)
