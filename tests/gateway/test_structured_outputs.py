"""Structured outputs over HTTP by OpenAI's own client: each answer meets its constraint."""

import json
import re
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.gateway.conftest import MODEL

QUESTION: list[Any] = [{"role": "user", "content": "Who are you?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 20},
        "sure": {"type": "boolean"},
        "words": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["answer", "sure", "words"],
    "additionalProperties": False,
}


class Person(BaseModel):
    """Answer of the test."""

    name: str = Field(max_length=20)
    is_old: bool


def test_a_chat_answers_by_its_schema(api: openai.OpenAI) -> None:
    chat = api.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        n=3,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
    )
    for choice in chat.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_the_client_parses_answers_into_its_own_classes(api: openai.OpenAI) -> None:
    chat = api.chat.completions.parse(model=MODEL, messages=QUESTION, seed=2, response_format=Person)
    assert isinstance(chat.choices[0].message.parsed, Person)


def test_a_stream_is_the_whole_answer(api: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "seed": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    }
    whole = api.chat.completions.create(**fields).choices[0].message.content
    events = api.chat.completions.create(**fields, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole


def test_any_json_object(api: openai.OpenAI) -> None:
    chat = api.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=30, response_format={"type": "json_object"}
    )
    assert (chat.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"[A-Z][a-z]{2} \d{2}"}, r"[A-Z][a-z]{2} \d{2}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'start: "a" | "b" start'}, "b*a"),
        ({"json": SCHEMA, "json_whitespace": "flexible"}, r"(?s)\{.*\}"),
        ({"json": json.dumps(SCHEMA), "json_object": False}, r"\{.*\}"),
    ],
    ids=["regex", "choice", "grammar", "flexible", "schema as text"],
)
def test_constraints_by_vllms_names(api: openai.OpenAI, constraint: dict[str, Any], pattern: str) -> None:
    done = api.completions.create(
        model=MODEL, prompt="Once", seed=4, max_tokens=200, extra_body={"structured_outputs": constraint}
    )
    assert done.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, done.choices[0].text)


@pytest.mark.parametrize(
    ("constraint", "has"),
    [
        ({}, "nothing"),
        ({"json_whitespace": "compact"}, "nothing"),
        ({"json_object": False}, "nothing"),
        ({"json": SCHEMA, "grammar": "start: x"}, "json and grammar"),
    ],
)
def test_the_refusal_of_none_and_of_several_names_the_fields_that_there_are(
    api: openai.OpenAI, constraint: dict[str, Any], has: str
) -> None:
    with pytest.raises(
        openai.BadRequestError, match=f"has {has}: give exactly one of json, json_object, regex, choice, grammar"
    ):
        api.completions.create(model=MODEL, prompt="Once", extra_body={"structured_outputs": constraint})
