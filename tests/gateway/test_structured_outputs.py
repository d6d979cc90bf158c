"""Structured outputs over HTTP by OpenAI's own client: each answer meets its constraint."""

import json
import re
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.gateway import reciter as recited
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


SEVEN: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"const": 7}},
    "required": ["n"],
    "additionalProperties": False,
}
THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}, "temperature": 0}
REASONING = "Hm: 2 + 2 it is."


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_that_reasons_answers_by_its_schema(reciter: tuple[str, str], stream: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SEVEN}}
    fields: dict[str, Any] = {"model": recited.MODEL, "messages": recited.asking("?"), "extra_body": THINKING}
    with openai.OpenAI(base_url=f"{reciter[1]}/v1", api_key="none", max_retries=0) as api:
        if stream:
            deltas = [
                event.choices[0].delta.to_dict()
                for event in api.chat.completions.create(**fields, response_format=form, stream=True)
            ]
            said = {name: "".join(str(each.get(name) or "") for each in deltas) for name in ("content", "reasoning")}
        else:
            said = api.chat.completions.create(**fields, response_format=form).choices[0].message.to_dict()
    assert json.loads(said["content"]) == {"n": 7}
    assert said["reasoning"].strip() == REASONING


def test_a_choice_is_content_where_the_prompt_opens_reasoning(reciter: tuple[str, str]) -> None:
    """Regression: the constraint holds from the first token on, so that no reasoning could end."""
    with openai.OpenAI(base_url=f"{reciter[1]}/v1", api_key="none", max_retries=0) as api:
        message = (
            api.chat.completions.create(
                model=recited.MODEL,
                messages=recited.asking("?"),
                extra_body={**THINKING, "structured_outputs": {"choice": ["red", "green"]}},
            )
            .choices[0]
            .message
        )
    assert message.content in ("red", "green")
    assert not message.to_dict().get("reasoning")


def test_a_response_that_reasons_answers_by_its_schema(reciter: tuple[str, str]) -> None:
    with openai.OpenAI(base_url=f"{reciter[1]}/v1", api_key="none", max_retries=0) as api:
        made = api.responses.create(
            model=recited.MODEL,
            input="?",
            text={"format": {"type": "json_schema", "name": "a", "schema": SEVEN}},
            extra_body=THINKING,
        )
        again = api.responses.retrieve(made.id)
    for response in (made, again):
        assert json.loads(response.output_text) == {"n": 7}
        assert [each.type for each in response.output] == ["reasoning", "message"]


def test_a_message_that_reasons_answers_by_its_schema(reciter: tuple[str, str]) -> None:
    with anthropic.Anthropic(base_url=reciter[1], api_key="none", max_retries=0) as claude:
        message = claude.messages.create(
            model=recited.MODEL,
            max_tokens=200,
            messages=recited.asking("?"),
            output_config={"format": {"type": "json_schema", "schema": SEVEN}},
            extra_body=THINKING,
        )
    thinking, text = message.content
    assert thinking.type == "thinking" and thinking.thinking.strip() == REASONING
    assert text.type == "text" and json.loads(text.text) == {"n": 7}
