"""Answers that come back as a part of the next request, in every form in which OpenAI's client has them."""

from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.gateway.reciter import MODEL, TOOLS, asking


class Number(BaseModel):
    """The form of an answer."""

    n: int


@pytest.fixture(scope="module")
def deployment(reciter: tuple[str, str]) -> tuple[str, str]:
    """Addresses of the scheduler and of the gateway."""
    return reciter


def created(api: openai.OpenAI) -> Any:
    return api.chat.completions.create(model=MODEL, messages=asking("call"), tools=TOOLS).choices[0].message


def accumulated(api: openai.OpenAI) -> Any:
    """A message of deltas, of which clients add up what they know and keep the rest."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    stream = api.chat.completions.create(model=MODEL, messages=asking("call"), tools=TOOLS, stream=True)
    for event in stream:
        delta = event.choices[0].delta
        message["content"] += delta.content or ""
        for each in delta.tool_calls or ():
            if each.id:
                message.setdefault("tool_calls", []).append(each.to_dict())
            elif each.function:
                message["tool_calls"][each.index]["function"]["arguments"] += each.function.arguments
    return message


def streamed_by_helper(api: openai.OpenAI) -> Any:
    with api.chat.completions.stream(model=MODEL, messages=asking("call"), tools=TOOLS) as stream:
        return stream.get_final_completion().choices[0].message


def parsed_calls(api: openai.OpenAI) -> Any:
    strict: Any = [{"type": "function", "function": {**each["function"], "strict": True}} for each in TOOLS]
    return api.chat.completions.parse(model=MODEL, messages=asking("call"), tools=strict).choices[0].message


@pytest.mark.parametrize("made", [created, accumulated, streamed_by_helper, parsed_calls])
@pytest.mark.parametrize("form", ["object", "dump", "dict"])
def test_a_message_with_calls_comes_back(api: openai.OpenAI, made: Callable[[openai.OpenAI], Any], form: str) -> None:
    message = made(api)
    calls = message["tool_calls"] if isinstance(message, dict) else message.tool_calls
    ids = [each["id"] if isinstance(each, dict) else each.id for each in calls]
    results = [{"role": "tool", "tool_call_id": each, "content": "sunny"} for each in ids]
    if not isinstance(message, dict) and form != "object":
        message = message.model_dump() if form == "dump" else message.to_dict()
    turns = [*asking("The weather?"), message, *results, *asking("plain")]
    answer = api.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS)
    assert answer.choices[0].message.content == "It rains: 3 < 4."


def test_a_message_comes_back_with_what_other_servers_and_clients_add(api: openai.OpenAI) -> None:
    message = created(api).to_dict()
    marks = {"provider_specific_fields": {"citations": None}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    call = message["tool_calls"][0]
    call |= marks | {"extra_content": {"google": {"thought_signature": "x"}}}
    call["function"] |= marks
    message |= marks | {"thinking_blocks": [thought], "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    turns: Any = [*asking("The weather?"), message, result, *asking("plain")]
    answer = api.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS)
    assert answer.choices[0].message.content == "It rains: 3 < 4."


def test_marks_of_caching_have_no_effect(api: openai.OpenAI) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    tools: Any = [{**each, **mark, "function": {**each["function"], **mark}} for each in TOOLS]
    part = {"type": "text", "text": asking("plain")[0]["content"]}
    plain: Any = {"messages": [{"role": "user", "content": [part]}], "tools": TOOLS}
    marked: Any = {"messages": [{"role": "user", "content": [part | mark], **mark}], "tools": tools, "extra_body": mark}
    first, second = (api.chat.completions.create(model=MODEL, **each) for each in (plain, marked))
    assert first.choices[0].message == second.choices[0].message
    assert first.usage is not None and second.usage is not None
    assert first.usage.prompt_tokens == second.usage.prompt_tokens  # the template sees no mark
    flat: Any = [{"type": "function", **each["function"]} for each in tools]
    spoken: Any = [{"role": "user", "content": [{"type": "input_text", "text": part["text"], **mark}], **mark}]
    assert api.responses.create(model=MODEL, input=spoken, tools=flat).output_text == "It rains: 3 < 4."


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of OpenAI's own client
@pytest.mark.parametrize("form", ["object", "dump"])
def test_a_parsed_message_comes_back(api: openai.OpenAI, form: str) -> None:
    parsed = api.chat.completions.parse(model=MODEL, messages=asking("number"), response_format=Number)
    message: Any = parsed.choices[0].message
    assert message.parsed == Number(n=7)
    turns = [*asking("?"), message if form == "object" else message.model_dump(), *asking("plain")]
    answer = api.chat.completions.create(model=MODEL, messages=turns)
    assert answer.choices[0].message.content == "It rains: 3 < 4."


def test_words_of_a_model_that_declined_come_back(api: openai.OpenAI) -> None:
    declined = [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Sorry."}]
    turns: Any = [*asking("?"), {"role": "assistant", "content": declined}, *asking("plain")]
    assert api.chat.completions.create(model=MODEL, messages=turns).choices[0].message.content == "It rains: 3 < 4."


@pytest.mark.parametrize("form", ["object", "dump"])
def test_items_of_a_response_come_back(api: openai.OpenAI, form: str) -> None:
    flat: Any = [{"type": "function", **each["function"]} for each in TOOLS]
    with api.responses.stream(model=MODEL, input="call", tools=flat) as stream:
        first = stream.get_final_response()
    assert [each.type for each in first.output] == ["reasoning", "message", "function_call"]
    parsed = api.responses.parse(model=MODEL, input="number", text_format=Number)
    assert parsed.output_parsed == Number(n=7)
    items: list[Any] = [*first.output, *parsed.output]
    if form == "dump":
        items = [each.model_dump() for each in items]
    call_id = next(each.call_id for each in first.output if each.type == "function_call")
    items.insert(len(first.output), {"type": "function_call_output", "call_id": call_id, "output": "sunny"})
    given: Any = [*asking("The weather?"), *items, *asking("plain")]
    assert api.responses.create(model=MODEL, input=given, tools=flat).output_text == "It rains: 3 < 4."
