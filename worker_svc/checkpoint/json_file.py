"""Reads the JSON files of a model folder: bounded in size and depth, and every value checked for type and range.

All values of such files are read here, so that a wrong one is always a CheckpointError with the file and the key.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.folder_files import read_text

MOST_BYTES = 4 << 20  # config.json has some KB, tokenizer_config.json with many added tokens some 100 KB
MOST_DEPTH = 32
_SHOWN_CHARACTERS = 60
_AGAIN = "correct it, or download the checkpoint again"


class JsonTable:
    """An object of a JSON file. Each method reads one key's value, or returns the default if the key is absent;
    a key without a default must be present.

    `null` is an error unless stated otherwise: callers that allow it ask `is_null` first. Methods raise
    CheckpointError.
    """

    def __init__(self, place: str, values: Mapping[str, Any]) -> None:
        """Wraps parsed values. place: the file, and the key in it, as messages name it."""
        self.place = place
        self._values = values

    def __contains__(self, key: str) -> bool:
        """True if the key is present with any value but `null`."""
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """True if the key is present with `null`: for some keys "none", while an absent key means the default."""
        return key in self._values and self._values[key] is None

    @property
    def keys(self) -> Sequence[str]:
        """Keys in the order of the file."""
        return tuple(self._values)

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int) -> int:
        """An integer from `least` to `most`."""
        value = self._value(key, default)
        if key in self._values and (type(value) is not int or not least <= value <= most):
            self.refuse(key, f"must be a whole number from {least} to {most}")
        return int(value)

    def number(
        self, key: str, default: float | None = None, *, above: float = -math.inf, most: float = math.inf
    ) -> float:
        """A finite number greater than `above`, at most `most`."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not _is_finite(value) or not above < value <= most:
            bounds = [f" above {above:g}"] * (above > -math.inf) + [f" at most {most:g}"] * (most < math.inf)
            self.refuse(key, f"must be a number{','.join(bounds)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            self.refuse(key, "must be a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; none if the key is absent or null."""
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self.refuse(key, "must be a list of strings")
        return tuple(value)

    def ids(self, key: str, *, most: int) -> tuple[int, ...]:
        """A token id, or a list of them; none if the key is absent or null."""
        value = self._values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(type(each) is int and 0 <= each <= most for each in ids):
            self.refuse(key, f"must be a token id, a whole number from 0 to {most}, or a list of them")
        return tuple(ids)

    def table(self, key: str) -> "JsonTable | None":
        """An object; None if the key is absent or null."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(key, "must be an object")
        return JsonTable(f"{self.place}: {key}", value)

    def raw(self, key: str) -> object:
        """The unchecked value, for keys of several types; None if the key is absent."""
        return self._values.get(key)

    def refuse(self, key: str, what: str, remedy: str = _AGAIN) -> NoReturn:
        """Raises CheckpointError for the value of a key. what: the rule, "must be a string"."""
        value = shown(self._values[key]) if key in self._values else "left out"
        raise CheckpointError(f"{self.place}: {key} is {value}, but {what}: {remedy}")

    def _value(self, key: str, default: object | None) -> Any:
        if key in self._values:
            return self._values[key]
        if default is None:
            raise CheckpointError(f"{self.place} lacks {key}: add it, or download the checkpoint again")
        return default


def read_table(folder: Path, name: str, most_bytes: int = MOST_BYTES) -> JsonTable | None:
    """The object that a file holds; None if there is no such file.

    Raises CheckpointError if it is too large, not UTF-8, not JSON, nested too deeply, or not an object.
    """
    text = read_text(folder, name, most_bytes)
    if text is None:
        return None
    path = folder / name
    try:
        content = json.loads(text)
        if "\\ud" in text.lower():  # possibly half of a surrogate pair, which UTF-8 cannot encode
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        _refuse_depth(path)
    except ValueError as error:  # also an integer of thousands of digits
        reason = str(error).split(";")[0]
        raise CheckpointError(f"{path} cannot be read as JSON ({reason}): download the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object: download the checkpoint again")
    if _depth(content) > MOST_DEPTH:
        _refuse_depth(path)
    return JsonTable(str(path), content)


def read_optional_table(folder: Path, name: str) -> JsonTable:
    """The object that a file holds, empty if there is no such file. Raises CheckpointError like `read_table`."""
    return read_table(folder, name) or JsonTable(str(folder / name), {})


def shown(value: object) -> str:
    """A value for an error message: JSON on one line, cut if it is long."""
    if isinstance(value, int) and abs(value) >= 10**_SHOWN_CHARACTERS:
        return "a number of very many digits"
    text = json.dumps(value, default=repr)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _depth(content: object) -> int:
    """Levels of objects and lists, without recursion."""
    depth = -1
    level = [content]
    while level and depth <= MOST_DEPTH:
        depth += 1
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for values in inner for each in values]
    return depth


def _refuse_depth(path: Path) -> NoReturn:
    raise CheckpointError(
        f"{path} is nested more than {MOST_DEPTH} levels deep, which no such file needs: download the checkpoint again"
    )


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False
