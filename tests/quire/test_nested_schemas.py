"""Schemas of arguments within that of a call: they take the arguments that they take alone, and no others."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.parsing.nested_schema import nested
from quire.parsing.tool_grammar import tool_grammar
from tests.quire.spoken_answers import LLAMA3_WITH_TOOLS

BYTES = LLTokenizer("byte")
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
PLACE = "/properties/parameters"
INTEGER = {"type": "integer"}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


TREE = closed({"left": {"$ref": "#"}, "value": INTEGER}, required=["value"])
OWN = "https://example.com/tools/a.json"
INNER = {"$id": "https://example.com/n", **closed({"b": {"$ref": "#/$defs/m"}}, **{"$defs": {"m": INTEGER}})}
# Schema, arguments that it takes, and arguments that it does not take.
CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "root": (TREE, [{"left": {"value": 2}, "value": 1}], [{"left": {"name": "f"}, "value": 1}, {"left": {}}]),
    "root by a definition": (
        {"$ref": "#/$defs/t", "$defs": {"t": closed({"next": {"$ref": "#/$defs/t"}})}},
        [{"next": {"next": {}}}],
        [{"next": 1}],
    ),
    "property": (closed({"x": INTEGER, "y": {"$ref": "#/properties/x"}}), [{"x": 1, "y": 2}], [{"y": "2"}]),
    "definitions": (
        closed({"y": {"$ref": "#/definitions/a~1b"}}, definitions={"a/b": INTEGER}),
        [{"y": 2}],
        [{"y": "2"}],
    ),
    "escaped": (closed({"y": {"$ref": "#/%24defs/n"}}, **{"$defs": {"n": INTEGER}}), [{"y": 2}], [{"y": "2"}]),
    "in lists": (
        closed({"y": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/n"}]}}}, **{"$defs": {"n": INTEGER}}),
        [{"y": [1, 2]}],
        [{"y": ["2"]}],
    ),
    "anchor": (
        closed({"y": {"$ref": "#n"}}, **{"$defs": {"n": {"$anchor": "n", **INTEGER}}}),
        [{"y": 2}],
        [{"y": "2"}],
    ),
    "id": ({"$id": OWN, **TREE}, [{"left": {"value": 2}, "value": 1}], [{"left": {}, "value": 1}]),
    "id in references": (
        closed({"x": {"$ref": f"{OWN}#/$defs/n"}, "y": {"$ref": "a.json"}}, **{"$id": OWN, "$defs": {"n": INTEGER}}),
        [{"x": 1, "y": {"y": {"x": 2}}}],
        [{"x": "1"}, {"y": 1}, {"y": {"parameters": {}}}],
    ),
    "inner id": (
        closed({"y": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": INNER}}),
        [{"y": {"b": 1}}],
        [{"y": {"b": ""}}],
    ),
    "dialect": (
        closed({"y": {"$ref": "#/definitions/n"}}, **{"$schema": "http://json-schema.org/draft-07/schema#"})
        | {"definitions": {"n": INTEGER}},
        [{"y": 1}],
        [{"y": "1"}],
    ),
    "property of the name $ref": (
        closed({"$ref": {"type": "string"}, "y": {"$ref": "#/properties/%24ref"}}),
        [{"$ref": "#", "y": "#"}],
        [{"$ref": 1}, {"y": 1}],
    ),
    "properties of the names of keywords": (
        closed(
            {each: {"$ref": "#/$defs/n"} for each in ("const", "default", "enum", "$id")}, **{"$defs": {"n": INTEGER}}
        ),
        [{"const": 1, "default": 2, "enum": 3, "$id": 4}],
        [{"const": "1"}, {"default": "2"}, {"enum": "3"}, {"$id": "4"}],
    ),
    "values": (
        closed({"a": {"const": {"$ref": "#"}}, "b": {"enum": [{"$ref": "#/x"}], "default": {"$ref": "#/x"}}}),
        [{"a": {"$ref": "#"}, "b": {"$ref": "#/x"}}],
        [{"a": {"$ref": f"#{PLACE}"}}, {"b": {"$ref": f"#{PLACE}/x"}}],
    ),
}


def takes(lark: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(BYTES.tokenize_str(text)) and matcher.is_accepting()


@pytest.mark.parametrize("name", CASES)
def test_arguments_of_a_call_beside_a_form_are_those_of_the_schema_alone(name: str) -> None:
    schema, right, wrong = CASES[name]
    alone = f"start: a\na: %json {json.dumps({**schema, 'x-guidance': STYLE})}"
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
    form = closed({"a": INTEGER})
    call = tool_grammar(LLAMA3_WITH_TOOLS, tools, max_calls=1, token_ids={}, is_forced=False, content=form)
    for arguments, is_right in [*((each, True) for each in right), *((each, False) for each in wrong)]:
        text = json.dumps(arguments)
        assert takes(alone, text) == is_right, text
        assert takes(call, f'{{"name": "f", "parameters": {text}}}') == is_right, text
    assert not takes(call, '{"name": "g", "parameters": {}}')


def test_only_references_to_the_schema_itself_are_rewritten() -> None:
    others: list[Any] = ["other.json#/x", "https://example.com/b#", "#anchor", "http://[", 3, None, ["#"], {"a": 1}]
    schema = {
        "$id": OWN,
        "allOf": [{"$ref": each} for each in others],
        "required": ["$ref"],
        "x": [True, {"$ref": "#"}],
    }
    head, inner = nested(schema, "/a")
    assert head == {"$id": OWN}
    assert inner == {"allOf": schema["allOf"], "required": ["$ref"], "x": [True, {"$ref": "#/a"}]}
    assert nested({"$id": 3, "$ref": "#", "properties": None}, "/a") == (
        {"$id": 3},
        {"$ref": "#/a", "properties": None},
    )
    assert nested({"$id": "http://[", "$ref": "#"}, "/a")[1] == {"$ref": "#"}, "it is refused where it is read"
