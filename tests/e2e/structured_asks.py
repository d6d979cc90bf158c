"""Requests with constraints of every kind, each with what its outputs must be."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema

import quire
from quire.params import GenerateParams

MAX_TOKENS = 300  # more than any output here needs

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "pattern": "^[A-Z][a-z]{2,8} (Street|Road)$"},
                "no": {"$ref": "#/$defs/no"},
            },
            "required": ["street", "no"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
    "$defs": {"no": {"type": "integer", "minimum": 1, "maximum": 99}},
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": "leaf"}]},
                "next": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        },
        "leaf": {
            "type": "object",
            "properties": {"v": {"type": "boolean"}},
            "required": ["v"],
            "additionalProperties": False,
        },
    },
}
PATTERN = r"[A-Z][a-z]{1,6}, \d{1,3} (apples|pears)( and \d pears)?\."
CHOICES = ["yes", "no", "yes, but", "maybe — später"]
SUM = 'start: term ("+" term){1,4}\nterm: /[1-9]/ | "(" /[0-9]{2}/ ")"'


def _validates(schema: Mapping[str, Any]) -> Callable[[str], bool]:
    validator = jsonschema.Draft202012Validator(schema)
    return lambda text: validator.is_valid(json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredAsk:
    """A request and the test of each of its outputs."""

    prompt: str
    params: GenerateParams
    holds: Callable[[str], bool] = field(compare=False)

    def check(self, completion: quire.Completion) -> None:
        for sample in completion.samples:
            assert sample.finish_reason is quire.FinishReason.STOP, sample
            assert self.holds(sample.text), (self.params, sample.text)


_KINDS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "person": ({"json_schema": PERSON}, _validates(PERSON)),
    "flexible": ({"json_schema": PERSON, "json_whitespace": "flexible"}, _validates(PERSON)),
    "tree": ({"json_schema": TREE}, _validates(TREE)),
    "expression": ({"regex": PATTERN}, lambda text: re.fullmatch(PATTERN, text) is not None),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "grammar": (
        {"lark": SUM},
        lambda text: re.fullmatch(r"([1-9]|\(\d\d\))(\+([1-9]|\(\d\d\))){1,4}", text) is not None,
    ),
}
_WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.1, "seed": 5},
    {"temperature": 0.9, "top_p": 0.9, "seed": 6, "n": 3},
    {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "seed": 7, "logprobs": 3},
    {"temperature": 1.0, "top_k": 20, "logit_bias": {96: 5.0}, "seed": 8, "n": 2, "best_of": 4},
    {"beam_width": 4, "n": 2},
)


def structured_asks() -> list[StructuredAsk]:
    """Each kind of constraint in each way of sampling."""
    return [
        StructuredAsk(
            prompt=f"Once upon a time number {number}",
            params={**constraint, **way, "max_tokens": MAX_TOKENS},  # type: ignore[typeddict-item]
            holds=holds,
        )
        for number, (constraint, holds) in enumerate(_KINDS.values())
        for way in _WAYS
    ]
