"""Items of stored responses that a request names by their ids, and conversations that are compacted to one item."""

import base64
from itertools import islice
from typing import Any

import httpx2
import openai
import pytest

import quire
from gateway_svc.openai.responses.items import InputCompaction, InputMessage
from gateway_svc.openai.responses.turns import turns_of
from tests.gateway.conftest import MODEL
from tests.gateway.test_responses import GREEDY, QUESTION, turns
from tests.gateway.test_streams import eventually


def reference(item_id: str | None) -> Any:
    return {"type": "item_reference", "id": item_id}


def items_of(api: openai.OpenAI, response_id: str) -> list[dict[str, Any]]:
    return [each.to_dict() for each in api.responses.input_items.list(response_id, order="asc").data]


def test_a_reference_stands_for_the_item_whatever_it_is_part_of(api: openai.OpenAI, sdk: quire.Client) -> None:
    first = api.responses.create(**GREEDY)
    [asked] = api.responses.input_items.list(first.id).data
    items: list[Any] = [reference(asked.id), {"id": first.output[0].id}, {"role": "user", "content": "And why?"}]
    second = api.responses.create(model=MODEL, input=items, temperature=0)
    assert second.output_text == sdk.chat(turns(QUESTION, first.output_text, "And why?"), temperature=0).text
    listed = items_of(api, second.id)  # as what they stand for
    assert [each["type"] for each in listed] == ["message"] * 3
    assert [each["id"] for each in listed[:2]] == [asked.id, first.output[0].id]
    assert listed[1]["content"][0]["text"] == first.output_text
    api.responses.delete(first.id)
    third = api.responses.create(model=MODEL, input="Once more.", previous_response_id=second.id, temperature=0)
    conversation = turns(QUESTION, first.output_text, "And why?", second.output_text, "Once more.")
    assert third.output_text == sdk.chat(conversation, temperature=0).text


def test_items_that_are_named_twice_are_listed_once_each(api: openai.OpenAI) -> None:
    first = api.responses.create(**GREEDY, max_output_tokens=4)
    named = [reference(first.output[0].id), {"role": "user", "content": "Why?", "id": "mine"}]
    response = api.responses.create(model=MODEL, input=[*named, *named], max_output_tokens=1)
    pages = api.responses.input_items.list(response.id, order="asc", limit=1)
    listed = [each.to_dict() for each in islice(pages, 5)]
    words = [each["content"][0]["text"] for each in listed]  # type: ignore[index]
    assert words == [first.output_text, "Why?"] * 2
    made: list[Any] = [reference(str(each["id"])) for each in listed[2:]]
    again = api.responses.create(model=MODEL, input=made, max_output_tokens=1)
    assert [each["content"][0]["text"] for each in items_of(api, again.id)] == words[2:]


def test_an_item_that_is_not_known_is_not_found(api: openai.OpenAI, http: httpx2.Client) -> None:
    stored = api.responses.create(**GREEDY, extra_body={"tenant": "one"})
    forgotten = api.responses.create(**GREEDY, store=False)
    known = str(stored.output[0].id)
    unknown = ["msg_1", "x", "", "msg_", f"{known}_7", known.replace("msg_", "fc_"), str(forgotten.output[0].id)]
    for item_id in unknown:
        answer = http.post("/v1/responses", json={"input": [reference(item_id)], "tenant": "one"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (404, "input", "not_found"), item_id
        assert error["type"] == "invalid_request_error" and f"'{item_id}'" in error["message"]
    for tenant in ("two", None):
        with pytest.raises(openai.NotFoundError):
            api.responses.create(model=MODEL, input=[reference(known)], extra_body={"tenant": tenant})
    for item in ({"type": "item_reference"}, {"id": 3}):
        assert http.post("/v1/responses", json={"input": [item]}).status_code == 400


def test_a_conversation_of_another_tenant_is_not_gone_on_with(http: httpx2.Client) -> None:
    def post(path: str, **fields: Any) -> httpx2.Response:
        return http.post(f"/v1/responses{path}", json={"input": QUESTION, **fields})

    first = post("", tenant="one", max_output_tokens=4).json()
    fields = {"previous_response_id": first["id"]}
    assert post("", **fields, tenant="one", max_output_tokens=4).status_code == 200
    for path in ("", "/input_tokens", "/compact"):
        for others in ({"tenant": "two"}, {}):
            answer = post(path, **fields, **others)
            error = answer.json()["error"]
            named = (answer.status_code, error["param"], error["code"])
            assert named == (400, "previous_response_id", "previous_response_not_found"), path


def test_an_item_of_a_response_that_runs_is_refused(api: openai.OpenAI) -> None:
    running = api.responses.create(model=MODEL, input="x", background=True, extra_body={"ignore_eos": True})
    with pytest.raises(openai.BadRequestError, match="has not ended yet"):
        api.responses.create(model=MODEL, input=[reference(running.id.replace("resp_", "msg_"))])
    api.responses.cancel(running.id)
    eventually(lambda: api.responses.retrieve(running.id).status == "cancelled")


def test_input_tokens_are_those_of_the_prompt(api: openai.OpenAI) -> None:
    for fields in ({"input": QUESTION}, {"input": QUESTION, "instructions": "Be kind."}):
        counted = api.responses.input_tokens.count(model=MODEL, **fields)  # type: ignore[arg-type]
        response = api.responses.create(model=MODEL, max_output_tokens=1, **fields)  # type: ignore[call-overload]
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == response.usage.input_tokens


def test_a_conversation_goes_on_without_input_and_does_not_begin_so(http: httpx2.Client) -> None:
    first = http.post("/v1/responses", json={"input": QUESTION, "max_output_tokens": 4}).json()
    fields = {"previous_response_id": first["id"], "max_output_tokens": 4, "ignore_eos": True}
    without: list[dict[str, Any]] = [{}, {"input": None}, {"input": []}]
    for more in without:
        assert http.post("/v1/responses", json={**fields, **more}).json()["status"] == "incomplete"
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        answer = http.post(path, json={"model": MODEL})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_a_conversation_is_compacted_and_goes_on_with_its_summary(api: openai.OpenAI, http: httpx2.Client) -> None:
    first = api.responses.create(**GREEDY)
    retrying = api.with_options(max_retries=9)  # the summary is drawn, and one that is too long is an error
    compacted = retrying.responses.compact(model=MODEL, previous_response_id=first.id, input="And why?")
    assert (compacted.object, compacted.usage.total_tokens > 0) == ("response.compaction", True)
    [item] = compacted.output
    assert item.type == "compaction" and item.id == compacted.id.replace("resp_", "cmp_")
    summary = base64.b64decode(item.encrypted_content.removeprefix("quire:")).decode()
    assert summary
    going_on: list[Any] = [item.to_dict(), {"role": "user", "content": "Go on."}]
    response = api.responses.create(model=MODEL, input=going_on, temperature=0)
    listed = items_of(api, response.id)
    assert [each["type"] for each in listed] == ["compaction", "message"]
    assert http.get(f"/v1/responses/{compacted.id}").status_code == 404, "it is no response"
    told = f"Summary of the conversation so far:\n{summary}\n\nGo on."
    plain = api.responses.input_tokens.count(model=MODEL, input=told)
    assert response.usage is not None and response.usage.input_tokens == plain.input_tokens


def test_nothing_is_not_compacted(http: httpx2.Client) -> None:
    nothing: list[dict[str, Any]] = [{}, {"input": []}, {"input": None}]
    for body in nothing:
        answer = http.post("/v1/responses/compact", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    long = {"input": [{"role": "user", "content": "One day a small puppy. " * 2000}]}
    assert http.post("/v1/responses/compact", json=long).status_code == 400, "it does not fit"


def test_a_summary_and_the_users_words_behind_it_are_one_turn() -> None:
    summary = InputCompaction.of("Ann asked for tea.")
    said = [InputMessage(role="user", content=each) for each in ("Now?", "Well?")]  # type: ignore[call-arg]
    made = turns_of([summary, *said])
    assert [turn.role for turn in made] == ["user"]
    assert made[0].content == "Summary of the conversation so far:\nAnn asked for tea.\n\nNow?\n\nWell?"
    assert turns_of(said)[1].content == "Well?"
