"""API keys: read from a file and from QUIRE_API_KEY, never from a command line, and compared as hashes.

The variable is for both sides: a server accepts each of its keys, a caller sends the first. No message shows a key.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from pathlib import Path

from quire.access_variables import API_KEY

SCHEME = "Bearer "
_KEY = re.compile(r"[!-+\--~]{1,512}")  # visible ASCII but the comma: it stands in headers and lists
_FORM = "a key has 1 to 512 visible ASCII characters, and no comma or space"


def read_api_keys(file: Path | None) -> tuple[str, ...]:
    """Keys of the variable, then those of the file, one a line; lines that begin with # are comments.

    Raises ValueError for a file that cannot be read or has no key, and for a text that cannot be one.
    """
    return tuple(dict.fromkeys([*_variable_keys(), *(() if file is None else _file_keys(file))]))


def first_variable_key() -> str | None:
    """The key that a caller sends unless it is given one; None without the variable. Raises ValueError."""
    return next(iter(_variable_keys()), None)


class AcceptedKeys:
    """The keys that a server accepts."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = [_hash(key.encode()) for key in keys]

    def __len__(self) -> int:
        return len(self._hashes)

    def accept(self, key: bytes) -> bool:
        """True if it is one of them. The time that this takes does not tell how much of it is right."""
        found = _hash(key)
        return sum(hmac.compare_digest(found, each) for each in self._hashes) > 0  # without a short cut

    def accept_header(self, value: bytes) -> bool:
        """The same for the value of an `authorization` header, whose scheme is in any case."""
        scheme, key = value[: len(SCHEME)], value[len(SCHEME) :]
        return scheme.lower() == SCHEME.lower().encode() and self.accept(key.strip())


def _variable_keys() -> list[str]:
    value = os.environ.get(API_KEY, "").strip()
    keys = [key for key in map(str.strip, value.split(",")) if key]
    if value and not keys:  # somebody wants keys: do not serve everybody
        raise ValueError(f"{API_KEY}: it has commas and no key between them; unset it to serve everybody")
    if not all(_KEY.fullmatch(key) for key in keys):
        raise ValueError(f"{API_KEY}: it has something that is no key: {_FORM}")
    return keys


def _file_keys(file: Path) -> list[str]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file of API keys {file} cannot be read: {_reason(error)}") from error
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not _KEY.fullmatch(key):
            raise ValueError(f"line {number} of {file} is no API key: {_FORM}")
        keys.append(key)
    if not keys:
        raise ValueError(f"the file of API keys {file} has none; write one a line, made by `openssl rand -hex 32`")
    return keys


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is no text"


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
