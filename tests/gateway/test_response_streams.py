"""Streams of `/v1/responses`: every event once, in order, the same ones whenever and from wherever they are read."""

import itertools
import json
import uuid
from typing import Any

import httpx2
import openai
import pytest

import quire
from tests.gateway.conftest import MODEL
from tests.gateway.test_streams import eventually

FIELDS: dict[str, Any] = {"model": MODEL, "input": "Who are you?", "seed": 3, "max_output_tokens": 40}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
ENDLESS: dict[str, Any] = {"model": MODEL, "input": "x", "ignore_eos": True, "stream": True}


def events_of(lines: Any) -> list[dict[str, Any]]:
    """Events of server-sent lines, whose names and ids are those of their data; the last line is the sentinel."""
    found: list[dict[str, Any]] = []
    for event in "\n".join(lines).strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        if fields["data"] == "[DONE]":
            found.append({})
            continue
        data = json.loads(fields["data"])
        assert fields["event"] == data["type"]
        assert fields["id"] == str(data["sequence_number"])
        found.append(data)
    assert found.pop() == {}
    return found


def streamed(http: httpx2.Client, **extra: Any) -> list[dict[str, Any]]:
    return events_of(http.post("/v1/responses", json=FIELDS | {"stream": True} | extra).text.splitlines())


def resumed(http: httpx2.Client, response_id: str, **params: Any) -> list[dict[str, Any]]:
    return events_of(http.get(f"/v1/responses/{response_id}", params={"stream": True} | params).text.splitlines())


@pytest.mark.parametrize("extra", [{}, LOGPROBS, {"background": True}, {"store": False}])
def test_a_stream_has_each_kind_of_event_in_order(http: httpx2.Client, extra: dict[str, Any]) -> None:
    events = streamed(http, **extra)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [kind.removeprefix("response.") for kind, _ in itertools.groupby(event["type"] for event in events)]
    assert kinds == [
        "created",
        *(["queued"] if "background" in extra else []),
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        kinds[-1],
    ]
    last = events[-1]["response"]
    assert kinds[-1] == last["status"] and last["status"] in ("completed", "incomplete")
    [item] = last["output"]
    [part] = item["content"]
    deltas = [event for event in events if event["type"].endswith("delta")]
    assert "".join(event["delta"] for event in deltas) == part["text"]
    assert [row for event in deltas for row in event["logprobs"]] == part["logprobs"]
    assert bool(part["logprobs"]) == (extra is LOGPROBS)
    by_kind = {event["type"].removeprefix("response."): event for event in events}
    assert by_kind["output_text.done"]["text"] == part["text"]
    assert by_kind["content_part.done"]["part"] == part
    assert by_kind["output_item.done"]["item"] == item
    assert {event["response"]["id"] for event in events if "response" in event} == {last["id"]}
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    assert by_kind["output_item.added"]["item"]["id"] == item["id"]
    if "store" not in extra:
        assert http.get(f"/v1/responses/{last['id']}").json() == last


def test_openais_client_gathers_the_final_response(api: openai.OpenAI) -> None:
    with api.responses.stream(model=MODEL, input="Who are you?", temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text
    assert api.responses.retrieve(final.id).output_text == text
    with api.responses.stream(response_id=final.id, starting_after=5) as stream:
        assert stream.get_final_response().output_text == text


@pytest.mark.parametrize("extra", [{}, LOGPROBS])
def test_a_stream_is_resumed_behind_any_event(http: httpx2.Client, extra: dict[str, Any]) -> None:
    events = streamed(http, **extra)
    response_id = events[0]["response"]["id"]
    assert resumed(http, response_id) == events
    for after in (0, 3, 4, 9, len(events) - 5, len(events) - 2, len(events) - 1, 10**6):
        assert resumed(http, response_id, starting_after=after) == events[after + 1 :]
    by_header = http.get(f"/v1/responses/{response_id}", params={"stream": True}, headers={"last-event-id": "7"})
    assert events_of(by_header.text.splitlines()) == events[8:]


def test_a_stream_that_breaks_is_resumed_while_the_response_goes_on(http: httpx2.Client, sdk: quire.Client) -> None:
    fields = ENDLESS | {"max_output_tokens": 300, "seed": 1}
    with http.stream("POST", "/v1/responses", json=fields) as answer:
        first = events_of([*itertools.islice(answer.iter_lines(), 4 * 20), "data: [DONE]"])
    response_id = first[0]["response"]["id"]
    rest = resumed(http, response_id, starting_after=first[-1]["sequence_number"])
    events = first + rest
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"].endswith("delta"))
    expected = sdk.chat(
        [{"role": "user", "content": "x"}], seed=1, ignore_eos=True, max_tokens=300, keep_special_tokens=False
    )
    assert text == expected.text == events[-1]["response"]["output"][0]["content"][0]["text"]
    assert resumed(http, response_id) == events


def test_a_repeated_request_with_the_same_key_resumes(http: httpx2.Client) -> None:
    key = {"idempotency-key": uuid.uuid4().hex}
    fields = FIELDS | {"stream": True, "store": False}
    events = events_of(http.post("/v1/responses", json=fields, headers=key).text.splitlines())
    again = http.post("/v1/responses", json=fields, headers=key | {"last-event-id": "6"})
    assert events_of(again.text.splitlines()) == events[7:]
    for wrong in ({"last-event-id": "6"}, key | {"last-event-id": "x"}):
        refused = http.post("/v1/responses", json=fields, headers=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "last-event-id")


def test_a_stream_that_is_cancelled_ends_so(http: httpx2.Client) -> None:
    with http.stream("POST", "/v1/responses", json=ENDLESS | {"background": True}) as answer:
        lines = answer.iter_lines()
        found = list(itertools.islice(lines, 4 * 12))
        response_id = events_of([*found, "data: [DONE]"])[0]["response"]["id"]
        cancelled = http.post(f"/v1/responses/{response_id}/cancel").json()
        found += lines
    events = events_of(found)
    assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.incomplete", "cancelled")
    assert events[-1]["response"] == cancelled
    assert resumed(http, response_id) == events


def test_a_deadline_that_passes_fails_the_response(http: httpx2.Client) -> None:
    *_, last = events_of(http.post("/v1/responses", json=ENDLESS | {"timeout_s": 0.5}).text.splitlines())
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"


def test_a_reader_that_leaves_cancels_what_nobody_can_retrieve(http: httpx2.Client, sdk: quire.Client) -> None:
    with http.stream("POST", "/v1/responses", json=ENDLESS | {"store": False}) as answer:
        first = events_of([*itertools.islice(answer.iter_lines(), 4), "data: [DONE]"])
    eventually(lambda: sdk.get(first[0]["response"]["id"]).state is quire.RequestState.CANCELLED)
