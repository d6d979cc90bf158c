"""`/v1/responses` by OpenAI's own client: the objects, their fields, and conversations of several responses."""

import json
import math
import uuid
from typing import Any, Literal

import httpx2
import openai
import pytest
from pydantic import BaseModel

import quire
from tests.gateway.conftest import MODEL
from tests.gateway.test_streams import eventually

QUESTION = "Who are you?"
GREEDY: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0}


class Mood(BaseModel):
    """Answer of the test."""

    mood: Literal["good", "bad"]
    is_sure: bool


def turns(*contents: str) -> list[dict[str, str]]:
    """A conversation that the user begins."""
    return [{"role": ("user", "assistant")[i % 2], "content": each} for i, each in enumerate(contents)]


def test_a_response_is_the_sdks_answer(api: openai.OpenAI, sdk: quire.Client) -> None:
    expected = sdk.chat(turns(QUESTION), temperature=0)
    response = api.responses.create(**GREEDY)
    assert (response.object, response.status, response.model) == ("response", "completed", MODEL)
    assert response.output_text == expected.text
    [item] = response.output
    assert item.type == "message" and (item.role, item.status) == ("assistant", "completed")
    assert response.id.startswith("resp_") and item.id == response.id.replace("resp_", "msg_")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )
    assert response.completed_at is not None and response.completed_at >= response.created_at
    assert (response.error, response.incomplete_details) == (None, None)


def test_fields_of_a_request_are_repeated(api: openai.OpenAI) -> None:
    given: dict[str, Any] = {
        "instructions": "Be kind.",
        "max_output_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.75,
        "metadata": {"color": "blue"},
        "user": "someone",
        "safety_identifier": "safe",
        "prompt_cache_key": "key",
        "truncation": "disabled",
    }
    response = api.responses.create(model=MODEL, input="x", **given).to_dict()
    assert given.items() <= response.items()
    plain = api.responses.create(model=MODEL, input="x", max_output_tokens=1).to_dict()
    assert (plain["temperature"], plain["top_p"], plain["metadata"], plain["instructions"]) == (1.0, 1.0, {}, None)
    assert (plain["store"], plain["background"], plain["tools"], plain["tool_choice"]) == (True, False, [], "auto")


def test_a_bound_of_the_output_makes_it_incomplete(api: openai.OpenAI) -> None:
    response = api.responses.create(**GREEDY, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and response.usage.output_tokens == 3
    assert response.output[0].to_dict()["status"] == "incomplete"


def test_input_is_text_or_messages_of_parts_and_earlier_output(api: openai.OpenAI, sdk: quire.Client) -> None:
    first = api.responses.create(**GREEDY)
    items: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        first.output[0].to_dict(),
        {"role": "user", "content": [{"type": "input_text", "text": "Why"}, {"type": "input_text", "text": "so?"}]},
    ]
    conversation = [
        {"role": "system", "content": "Be kind."},
        *turns(QUESTION, first.output_text, "Why\nso?"),
    ]
    response = api.responses.create(model=MODEL, input=items, temperature=0)
    assert response.output_text == sdk.chat(conversation, temperature=0).text


def test_a_conversation_goes_on_by_the_id_of_its_last_response(api: openai.OpenAI, sdk: quire.Client) -> None:
    first = api.responses.create(**GREEDY, instructions="Be kind.")
    second = api.responses.create(model=MODEL, input="And why?", previous_response_id=first.id, temperature=0)
    third = api.responses.create(
        model=MODEL, input="Once more.", previous_response_id=second.id, instructions="Be brief.", temperature=0
    )
    assert third.previous_response_id == second.id
    conversation = turns(QUESTION, first.output_text, "And why?")
    assert second.output_text == sdk.chat(conversation, temperature=0).text
    conversation = [
        {"role": "system", "content": "Be brief."},
        *turns(QUESTION, first.output_text, "And why?", second.output_text, "Once more."),
    ]
    assert third.output_text == sdk.chat(conversation, temperature=0).text


def test_a_response_is_retrieved_as_it_was_answered(api: openai.OpenAI) -> None:
    for extra in ({}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"max_output_tokens": 2}):
        answered = api.responses.create(**GREEDY, **extra)
        assert api.responses.retrieve(answered.id).to_dict() == answered.to_dict()


def test_logprobs_come_if_they_are_included(api: openai.OpenAI) -> None:
    response = api.responses.create(**GREEDY, include=["message.output_text.logprobs"], top_logprobs=2)
    [part] = response.output[0].to_dict()["content"]
    assert "".join(each["token"] for each in part["logprobs"]).startswith(part["text"])
    assert all(len(each["top_logprobs"]) == 2 and math.isfinite(each["logprob"]) for each in part["logprobs"])
    assert len(part["logprobs"]) == response.usage.output_tokens


def test_a_response_in_the_background_is_polled(api: openai.OpenAI, sdk: quire.Client) -> None:
    begun = api.responses.create(**GREEDY, background=True)
    assert (begun.status, begun.output, begun.usage) == ("queued", [], None)
    eventually(lambda: api.responses.retrieve(begun.id).status == "completed")
    response = api.responses.retrieve(begun.id)
    assert response.output_text == sdk.chat(turns(QUESTION), temperature=0).text
    assert response.background


def test_a_response_is_seen_as_it_grows(api: openai.OpenAI) -> None:
    begun = api.responses.create(model=MODEL, input="x", background=True, extra_body={"ignore_eos": True})

    def has_text() -> bool:
        response = api.responses.retrieve(begun.id)
        return response.status == "in_progress" and bool(response.output_text)

    eventually(has_text)
    assert api.responses.cancel(begun.id).status == "cancelled"


def test_a_response_is_cancelled(api: openai.OpenAI) -> None:
    begun = api.responses.create(model=MODEL, input="x", background=True, extra_body={"ignore_eos": True})
    cancelled = api.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert api.responses.cancel(begun.id).to_dict() == cancelled.to_dict() == api.responses.retrieve(begun.id).to_dict()


def test_a_conversation_goes_on_only_behind_what_has_ended(api: openai.OpenAI, sdk: quire.Client) -> None:
    running = api.responses.create(model=MODEL, input="x", background=True, extra_body={"ignore_eos": True})
    sdk.pause(running.id)
    with pytest.raises(openai.BadRequestError, match="has not ended yet"):
        api.responses.create(model=MODEL, input="y", previous_response_id=running.id)
    assert api.responses.cancel(running.id).status == "cancelled"
    api.responses.create(model=MODEL, input="y", previous_response_id=running.id, max_output_tokens=1)


def test_a_deleted_response_is_gone(api: openai.OpenAI, http: httpx2.Client) -> None:
    running = api.responses.create(model=MODEL, input="x", background=True, extra_body={"ignore_eos": True})
    for gone in (api.responses.create(**GREEDY).id, running.id):
        answer = http.delete(f"/v1/responses/{gone}")
        assert answer.json() == {"id": gone, "object": "response", "deleted": True}
        for again in (api.responses.retrieve, api.responses.delete, api.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                again(gone)
        with pytest.raises(openai.BadRequestError, match="not found"):
            api.responses.create(model=MODEL, input="x", previous_response_id=gone)


def test_what_is_not_stored_cannot_be_retrieved(api: openai.OpenAI, sdk: quire.Client) -> None:
    response = api.responses.create(**GREEDY, store=False)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(model=MODEL, input="x", previous_response_id=response.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    assert QUESTION.encode() not in sdk.get(response.id).annotation


def test_requests_that_are_no_responses_are_not_found(api: openai.OpenAI, sdk: quire.Client) -> None:
    forged = f"resp_{uuid.uuid4().hex}"
    sdk.generate("x", max_tokens=1, request_id=forged, annotation=b'{"model": "demo"}')
    for unknown in (forged, "resp_none", "chatcmpl-1", "resp_" + "x" * 200, "resp_ü"):
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(unknown)


def test_items_of_an_input_are_listed_in_pages(api: openai.OpenAI) -> None:
    items: list[Any] = turns(*(f"turn {i}" for i in range(5)))
    response = api.responses.create(model=MODEL, input=items, max_output_tokens=1)
    texts = [f"turn {i}" for i in range(5)]
    for order in ("asc", "desc"):
        found = api.responses.input_items.list(response.id, order=order, limit=2)
        listed = [item.to_dict() for item in found]  # by pages
        shown = [each["content"][0]["text"] for each in listed]  # type: ignore[index]
        assert shown == (texts if order == "asc" else texts[::-1])
    assert [each["role"] for each in listed] == ["user", "assistant", "user", "assistant", "user"]
    assert len({each["id"] for each in listed}) == 5


def test_a_response_has_the_form_of_its_schema(api: openai.OpenAI) -> None:
    response = api.responses.parse(model=MODEL, input=QUESTION, text_format=Mood)
    assert isinstance(response.output_parsed, Mood)
    assert response.text is not None and response.text.format is not None
    shown: Any = response.text.format.to_dict()
    assert (shown["type"], shown["name"], shown["schema"]["required"]) == ("json_schema", "Mood", ["mood", "is_sure"])
    assert api.responses.retrieve(response.id).text == response.text
    plain = api.responses.create(**GREEDY, text={"format": {"type": "text"}, "verbosity": "low"}, max_output_tokens=1)
    assert plain.to_dict()["text"] == {"format": {"type": "text"}}


@pytest.mark.parametrize("max_output_tokens", [20, None])
def test_a_conversation_that_is_too_long_loses_its_oldest_turns_if_asked_to(
    max_output_tokens: int | None, api: openai.OpenAI, sdk: quire.Client
) -> None:
    """An answer without a bound has a quarter of the context."""
    long = [*(f"{name} " * 400 for name in ("one", "two", "three", "four", "five", "six")), "Why?"]
    items: Any = turns(*long)
    kept = [{"role": "system", "content": "Be kind."}, *items]
    context = sdk.model().max_model_len
    bound = max_output_tokens or context // 4
    assert len(sdk.tokenize(kept).token_ids) > context
    while len(sdk.tokenize(kept).token_ids) + bound > context:
        del kept[1:3]
    fields: Any = {"model": MODEL, "input": items, "instructions": "Be kind.", "max_output_tokens": max_output_tokens}
    response = api.responses.create(**fields, truncation="auto", temperature=0)
    most = max_output_tokens or context - len(sdk.tokenize(kept).token_ids)
    assert response.output_text == sdk.chat(kept, temperature=0, max_tokens=most).text
    assert len(kept) < len(long) and response.truncation == "auto"
    with pytest.raises(openai.BadRequestError):
        api.responses.create(**fields)


def test_a_retry_with_the_same_key_is_the_same_response(http: httpx2.Client) -> None:
    key, other_key = ({"idempotency-key": uuid.uuid4().hex} for _ in range(2))
    fields = {"model": MODEL, "input": QUESTION}
    first, second = (http.post("/v1/responses", json=fields, headers=key).json() for _ in range(2))
    assert first == second
    begun, known = (http.post("/v1/responses", json=fields | {"background": True}, headers=other_key) for _ in range(2))
    assert (begun.json()["status"], known.json()["id"]) == ("queued", begun.json()["id"])
    assert known.headers["x-request-id"] == known.json()["id"]
    other = http.post("/v1/responses", json=fields | {"input": "y"}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


def test_an_input_too_large_to_keep_is_refused_only_if_it_is_stored(http: httpx2.Client) -> None:
    fields = {"model": MODEL, "input": "y" * 300_000}
    refused = http.post("/v1/responses", json=fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert "store: false" in refused.json()["error"]["message"]
    answer = http.post("/v1/responses", json=fields | {"store": False})
    assert answer.json()["error"]["code"] == "context_length_exceeded"  # nothing but the model's context refuses it


@pytest.mark.parametrize("store", [True, False])
def test_instructions_too_large_to_keep_are_refused_stored_or_not(http: httpx2.Client, store: bool) -> None:
    fields = {"model": MODEL, "input": "x", "instructions": "y" * 300_000, "store": store}
    error = http.post("/v1/responses", json=fields).json()["error"]
    assert error["param"] == "instructions" and "262,144" in error["message"]
    assert "store: false" not in error["message"], "it would not help"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "what"}}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"truncation": "middle"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"beam_width": 2}, "beam_width"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"background": True, "store": False}, "background"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**7}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"input": None}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_wrong_field_is_named(http: httpx2.Client, extra: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "x"} | extra)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize(
    ("extra", "param", "named"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "input_text",
        ),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "file_search"),
    ],
)
def test_a_type_that_is_not_supported_is_named(
    http: httpx2.Client, extra: dict[str, Any], param: str, named: str
) -> None:
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "x"} | extra)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param)
    assert "this server" in error["message"] and named in error["message"]


@pytest.mark.parametrize("asked", [True, False, None])
def test_the_last_event_has_the_usage_whether_asked_for_it_or_not(http: httpx2.Client, asked: bool | None) -> None:
    options = {"stream_options": {"include_usage": asked}}  # as AIPerf asks for it on each of its routes
    answer = http.post("/v1/responses", json=dict(GREEDY, stream=True, max_output_tokens=3, **options))
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    assert json.loads(lines[-1].removeprefix("data: "))["response"]["usage"]["output_tokens"] == 3


def test_a_refusal_is_what_the_assistant_said(http: httpx2.Client, sdk: quire.Client) -> None:
    refused = [{"type": "refusal", "refusal": "I cannot."}]
    given = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": refused},
        {"role": "user", "content": "Why?"},
    ]
    answer = http.post("/v1/responses", json={"model": MODEL, "input": given, "temperature": 0}).json()
    expected = sdk.chat(turns(QUESTION, "I cannot.", "Why?"), temperature=0)
    assert answer["output"][0]["content"][0]["text"] == expected.text
    listed = http.get(f"/v1/responses/{answer['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert listed[1]["content"] == refused
