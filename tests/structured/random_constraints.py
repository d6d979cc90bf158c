"""Constraints at random: JSON schemas of many kinds, regular expressions, choices; each with the test of its outputs.

Every constraint bounds its outputs, so that one that runs to `max_tokens` shows a fault. Pure, by its generator.
"""

import json
import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import jsonschema

MOST_DEPTH = 3
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
_FORMATS_OF_RFC_3339 = jsonschema.FormatChecker(formats=("uuid", "ipv4"))
_LITERALS = ("red", "a b", 'quo"te', "back\\slash", "Ünï", "日本", "x/y", "", "null")

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Parameters of a request, and the test of each of its outputs."""

    kind: str
    params: dict[str, Any]
    holds: Callable[[str], bool] = field(compare=False)


def random_constraint(generator: random.Random) -> Constraint:
    """A constraint: a schema in three of four cases."""
    if generator.random() < 0.75:
        return _of_schema(generator)
    if generator.random() < 0.7:
        pattern = _pattern(generator, 3)
        return Constraint(
            kind="regex", params={"regex": pattern}, holds=lambda text: re.fullmatch(pattern, text) is not None
        )
    texts = sorted({_word(generator, 1, 12) for _ in range(generator.randint(1, 6))})
    return Constraint(kind="choice", params={"choice": texts}, holds=lambda text: text in texts)


@_FORMATS_OF_RFC_3339.checks("date", raises=ValueError)
def _is_date(value: object) -> bool:
    """Check a date of RFC 3339, which has a year 0, and Python has none. Other types have no format."""
    if isinstance(value, str):
        date.fromisoformat("2000" + value[4:] if value.startswith("0000") else value)
        return re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None
    return True


@_FORMATS_OF_RFC_3339.checks("time")
def _is_time(value: object) -> bool:
    zone = r"(z|[+-]([01]\d|2[0-3]):[0-5]\d)"
    moment = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?"
    return not isinstance(value, str) or re.fullmatch(rf"(?i){moment}{zone}", value) is not None


@_FORMATS_OF_RFC_3339.checks("date-time", raises=ValueError)
def _is_date_time(value: object) -> bool:
    if isinstance(value, str):
        return _is_date(value[:10]) and value[10:11] in ("T", "t") and _is_time(value[11:])
    return True


def _of_schema(generator: random.Random) -> Constraint:
    schema = _schema(generator, 0)
    if generator.random() < 0.2:
        schema = {"$ref": "#/$defs/whole", "$defs": {"whole": schema}}
    params: dict[str, Any] = {"json_schema": schema}
    if generator.random() < 0.3:
        params["json_whitespace"] = "flexible"
    validator = jsonschema.Draft202012Validator(schema, format_checker=_FORMATS_OF_RFC_3339)

    def holds(text: str) -> bool:
        try:
            return validator.is_valid(json.loads(text))
        except ValueError:
            return False

    return Constraint(kind=f"schema {schema.get('type', 'of others')}", params=params, holds=holds)


def _schema(generator: random.Random, depth: int) -> Schema:
    makers = [_string, _number, _enum, _boolean]
    if depth < MOST_DEPTH:
        makers += [_object, _object, _array, _any_of]
    return generator.choice(makers)(generator, depth)


def _object(generator: random.Random, depth: int) -> Schema:
    names = [f"{_word(generator, 1, 6)}{i}" for i in range(generator.randint(1, 4))]
    properties = {name: _schema(generator, depth + 1) for name in names}
    required = [name for name in names if generator.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(generator: random.Random, depth: int) -> Schema:
    least = generator.randint(0, 2)
    most = least + generator.randint(0 if least else 1, 2)
    if generator.random() < 0.2:
        items = [_schema(generator, depth + 1) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2, "maxItems": 2}
    return {"type": "array", "items": _schema(generator, depth + 1), "minItems": least, "maxItems": most}


def _any_of(generator: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(generator, depth + 1) for _ in range(2)] + [{"type": "null"}]}


def _string(generator: random.Random, depth: int) -> Schema:
    kind = generator.random()
    if kind < 0.25:
        return {"type": "string", "format": generator.choice(_FORMATS), "maxLength": 40}
    if kind < 0.5:
        return {"type": "string", "pattern": f"^{_pattern(generator, 2)}$"}
    least = generator.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + generator.randint(1, 16)}


def _number(generator: random.Random, depth: int) -> Schema:
    low = generator.randint(-1000, 1000)
    if generator.random() < 0.8:
        return {"type": "integer", "minimum": low, "maximum": low + generator.randint(0, 10_000)}
    return {"type": "integer", "minimum": low * 5, "maximum": low * 5 + 1000, "multipleOf": 5}


def _enum(generator: random.Random, depth: int) -> Schema:
    values: list[Any] = [*_LITERALS, 1, -2.5, True, None, {"a": [1]}, [1, "b"]]
    if generator.random() < 0.3:
        return {"const": generator.choice(values)}
    return {"enum": generator.sample(values, generator.randint(1, 4))}


def _boolean(generator: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _pattern(generator: random.Random, depth: int) -> str:
    """A bounded regular expression, in the syntax that Python and Rust share."""
    if depth == 0:
        return generator.choice(["[a-z]", "[A-Z0-9]", r"\d", "x", "[äöü]", r"\.", "-", "[^a-m\\x00-\\x1f]"])
    parts = []
    for _ in range(generator.randint(1, 3)):
        part = _pattern(generator, depth - 1)
        least = generator.randint(0, 2)
        parts.append(
            generator.choice([part, f"({part}){{{least},{least + 2}}}", f"({part}|{_pattern(generator, depth - 1)})"])
        )
    return "".join(parts)


def _word(generator: random.Random, least: int, most: int) -> str:
    letters = string.ascii_letters + " _-é"
    return "".join(generator.choice(letters) for _ in range(generator.randint(least, most)))
