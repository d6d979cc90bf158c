"""Forms of content beside calls without a marker, and behind reasoning: what may be written, and what is content."""

from typing import Any

import pytest

import quire
from gateway_svc.call_grammars import CallGrammars
from gateway_svc.tool_use import ToolUse
from gateway_svc.vocabulary import Vocabulary
from quire.params import GenerateParams
from quire.parsing.answer_format import AnswerFormat
from tests.gateway.scripted_client import Scripted, ScriptedClient
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


class ThinkingClient(ScriptedClient):
    """A client whose prompts end so."""

    def __init__(self, tail: str) -> None:
        super().__init__(Scripted(chunks=()))
        self._tail = tail

    async def detokenize(self, token_ids: Any, **_: Any) -> str:
        return self._tail


JSON_FORMS: list[GenerateParams] = [{"json_schema": CLOSED}, {"json_object": True}]
OTHER_FORM: GenerateParams = {"structured_output": quire.StructuredOutput(regex="a+")}
THINKING = HERMES.without_calls()


@pytest.mark.parametrize("given", JSON_FORMS)
async def test_json_comes_behind_reasoning_that_the_prompt_opens(given: GenerateParams) -> None:
    keywords = given.copy()
    format = await constrained(keywords, THINKING, "<think>\n")
    assert format == THINKING and set(keywords) == {"lark"}
    assert "</think>" in keywords["lark"] and "content: %json" in keywords["lark"]


@pytest.mark.parametrize("given", [*JSON_FORMS, OTHER_FORM])
async def test_a_form_stays_where_the_prompt_opens_no_reasoning(given: GenerateParams) -> None:
    for format, tail in ((THINKING, "<think>\n\n</think>\n\n"), (AnswerFormat(), "<think>")):
        keywords = given.copy()
        assert await constrained(keywords, format, tail) == format and keywords == given


async def test_what_a_constraint_keeps_from_ending_is_no_reasoning() -> None:
    keywords = OTHER_FORM.copy()
    assert await constrained(keywords, THINKING, "<think>") == AnswerFormat() and keywords == OTHER_FORM


async def constrained(keywords: GenerateParams, format: AnswerFormat, tail: str) -> AnswerFormat:
    """The format of the answer to a request without tools, whose prompt ends so."""
    async with ThinkingClient(tail) as client:
        grammars = CallGrammars(client, Vocabulary(client))
        return await grammars.constrain(keywords, format, quire.Chat(messages=[]), ToolUse(tools=[]))
