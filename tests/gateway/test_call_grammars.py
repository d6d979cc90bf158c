"""Forms of content beside calls without a marker: when the model may call, and when all that it writes is content."""

from typing import Any

import pytest

import quire
from gateway_svc.call_grammars import CallGrammars
from gateway_svc.tool_use import ToolUse
from gateway_svc.vocabulary import Vocabulary
from quire.params import GenerateParams
from tests.quire.spoken_answers import HERMES, LLAMA3

CLOSED = {"type": "object", "additionalProperties": False}
CALL_LIKE = {"name": {"type": "string"}, "parameters": {"type": "object"}}


def tool_use(*, strict: bool) -> ToolUse:
    return ToolUse(tools=[{"type": "function", "function": {"name": "weather", "strict": strict}}])


@pytest.mark.parametrize(
    ("schema", "is_mistakable"),
    [
        ({"type": "array"}, False),
        ({"type": ["string", "null"]}, False),
        (CLOSED, False),
        ({**CLOSED, "properties": {"name": {"type": "string"}}}, False),
        ({**CLOSED, "properties": {"parameters": {}}}, False),
        ({**CLOSED, "properties": CALL_LIKE}, True),
        ({**CLOSED, "properties": CALL_LIKE | {"name": {"enum": ["Bob", 3]}}}, False),
        ({**CLOSED, "properties": CALL_LIKE | {"name": {"const": "Bob"}}}, False),
        ({**CLOSED, "properties": CALL_LIKE | {"name": {"enum": ["weather"]}}}, True),
        ({**CLOSED, "properties": {}, "patternProperties": {".": {}}}, True),
        ({"anyOf": [CLOSED, {"type": "string"}]}, False),
        ({"anyOf": [CLOSED, {"type": "object"}]}, True),
        ({"type": "object"}, True),
        ({}, True),
        ({"$ref": "#/$defs/a"}, True),
        ({"type": 3, "properties": 4, "anyOf": 5}, True),
        ({**CLOSED, "properties": CALL_LIKE | {"name": {"enum": 5}}}, True),
        ({"anyOf": [7]}, True),
    ],
)
async def test_a_strict_tool_and_a_form_that_may_be_taken_for_its_call_leave_the_form_alone(
    schema: dict[str, Any], is_mistakable: bool
) -> None:
    async with quire.AsyncClient("127.0.0.1:1") as client:  # asked for nothing: LLaMA 3 has no markers
        grammars = CallGrammars(client, Vocabulary(client))
        for strict in (True, False):
            keywords: GenerateParams = {"json_schema": schema}
            use = tool_use(strict=strict)
            format = await grammars.constrain(keywords, use.format(LLAMA3), quire.Chat(messages=[]), use)
            if strict and is_mistakable:
                assert (format, keywords) == (LLAMA3.without_calls(), {"json_schema": schema})
            else:
                assert format == LLAMA3.offering(["weather"]) and set(keywords) == {"lark"}


async def test_where_nothing_is_to_be_enforced_the_format_stays_and_knows_the_tools() -> None:
    async with quire.AsyncClient("127.0.0.1:1") as client:
        use, keywords = tool_use(strict=False), GenerateParams()
        format = await CallGrammars(client, Vocabulary(client)).constrain(
            keywords, use.format(HERMES), quire.Chat(messages=[]), use
        )
    assert (format, keywords) == (HERMES.offering(["weather"]), {})
