"""`/v1/chat/completions` by OpenAI's own client, compared with the SDK on the same deployment."""

from typing import Any

import openai
import pytest

import quire
from tests.gateway.conftest import MODEL

QUESTION: list[Any] = [{"role": "user", "content": "Who are you?"}]


def test_an_answer_is_the_sdks(api: openai.OpenAI, sdk: quire.Client) -> None:
    expected = sdk.chat(QUESTION, temperature=0, max_tokens=40)
    answer = api.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=40)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason.value
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == expected.usage.completion_tokens


def test_an_answer_ends_by_itself_where_no_bound_is_given(api: openai.OpenAI, sdk: quire.Client) -> None:
    answer = api.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == sdk.chat(QUESTION, temperature=0).text
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("bound", ["max_tokens", "max_completion_tokens"])
def test_both_names_bound_an_answer(api: openai.OpenAI, bound: str) -> None:
    answer = api.chat.completions.create(model=MODEL, messages=QUESTION, **{bound: 3})  # type: ignore[call-overload]
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_events_add_up_to_the_whole_answer(api: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "n": 3, "seed": 2, "max_completion_tokens": 24}
    whole = api.chat.completions.create(**fields)
    texts, roles, reasons, ids = [""] * 3, [""] * 3, [None] * 3, set()
    usages = []
    for event in api.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        ids.add(event.id)
        assert event.object == "chat.completion.chunk"
        if event.usage is not None:
            usages.append(event.usage)
        for choice in event.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role or ""
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ["assistant"] * 3
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(ids) == 1
    assert usages == [whole.usage]


def test_streams_have_no_usage_unless_asked_for(api: openai.OpenAI) -> None:
    events = api.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=3, stream=True)
    assert [event for event in events if event.usage is not None or not event.choices] == []


def test_logprobs_are_an_object_for_each_token(api: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 8}
    fields |= {"logprobs": True, "top_logprobs": 2}
    [choice] = api.chat.completions.create(**fields).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert "".join(each.token for each in tokens) == choice.message.content
    assert bytes(byte for each in tokens for byte in each.bytes or ()).decode() == choice.message.content
    for each in tokens:
        assert len(each.top_logprobs) == 2
        assert (each.top_logprobs[0].token, each.top_logprobs[0].logprob) == (each.token, each.logprob)
    streamed = [
        token
        for event in api.chat.completions.create(**fields, stream=True)
        if event.choices[0].logprobs is not None
        for token in event.choices[0].logprobs.content or ()
    ]
    assert streamed == tokens


def test_logprobs_without_top_have_none(api: openai.OpenAI) -> None:
    [choice] = api.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2, logprobs=True).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [each.top_logprobs for each in choice.logprobs.content] == [[], []]


def test_parts_of_text_are_lines_and_developers_are_the_system(api: openai.OpenAI, sdk: quire.Client) -> None:
    parts = [{"type": "text", "text": "Who are"}, {"type": "text", "text": "you?"}]
    messages: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": parts, "type": "text"},
    ]
    expected = sdk.chat(
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who are\nyou?"}],
        temperature=0,
        max_tokens=12,
    )
    answer = api.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_completion_tokens=12)
    assert answer.choices[0].message.content == expected.text


def test_a_final_message_is_continued_as_vllms_fields_ask(api: openai.OpenAI, sdk: quire.Client) -> None:
    whole = sdk.chat(QUESTION, temperature=0, max_tokens=40).text
    begin, rest = whole[: whole.index(" ", 6)], whole[whole.index(" ", 6) :]
    prefilled: list[Any] = [*QUESTION, {"role": "assistant", "content": begin}]
    fields: dict[str, Any] = {"model": MODEL, "messages": prefilled, "temperature": 0, "max_completion_tokens": 40}
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    answer = api.chat.completions.create(**fields, extra_body=continued)
    assert answer.choices[0].message.content == rest
    with pytest.raises(openai.BadRequestError, match="continue_final_message: excludes add_generation_prompt"):
        api.chat.completions.create(**fields, extra_body=continued | {"add_generation_prompt": True})
