"""Streams of completions and chats that break, and are resumed by Last-Event-ID without a character twice."""

import json
import uuid
from typing import Any

import httpx2
import openai
import pytest

from tests.gateway.conftest import MODEL
from tests.gateway.test_streams import first_event

COMPLETION: tuple[str, dict[str, Any]] = (
    "/v1/completions",
    {"model": MODEL, "prompt": ["Once upon a time", "One day"], "n": 2, "seed": 5, "max_tokens": 12, "stream": True},
)
CHAT: tuple[str, dict[str, Any]] = (
    "/v1/chat/completions",
    {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Who are you?"}],
        "seed": 5,
        "max_tokens": 24,
        "stream": True,
    },
)
USAGE = {"stream_options": {"include_usage": True}}
Event = tuple[str | None, dict[str, Any]]  # its id and data; those of [DONE] are none


def read(http: httpx2.Client, call: tuple[str, dict[str, Any]], **headers: str) -> list[Event]:
    path, body = call
    found: list[Event] = []
    for event in http.post(path, json=body, headers=headers).text.strip().split("\n\n"):
        *ids, data = event.split("\n")
        data = data.removeprefix("data: ")
        event_id = ids[0].removeprefix("id: ") if ids else None
        found.append((event_id, {} if data == "[DONE]" else json.loads(data)))
    return found


def by_output(events: list[Event]) -> dict[int, list[dict[str, Any]]]:
    """Choices of each output, in order."""
    found: dict[int, list[dict[str, Any]]] = {}
    for _, data in events:
        for choice in data.get("choices", ()):
            found.setdefault(choice["index"], []).append(choice)
    return found


@pytest.mark.parametrize("call", [COMPLETION, CHAT], ids=["completions", "chat"])
@pytest.mark.parametrize("extra", [{}, USAGE, {"logprobs": 1}], ids=["plain", "usage", "logprobs"])
def test_what_comes_behind_any_event_is_what_the_reader_lacks(
    http: httpx2.Client, call: tuple[str, dict[str, Any]], extra: dict[str, Any]
) -> None:
    if call is CHAT and "logprobs" in extra:
        extra = {"logprobs": True, "top_logprobs": 2}
    path, body = call
    call = path, body | extra
    key = {"idempotency-key": uuid.uuid4().hex}
    events = read(http, call, **key)
    assert events[-1] == (None, {})
    whole = by_output(events)
    places = [place for place, (event_id, _) in enumerate(events) if event_id is not None]
    assert places
    for place in [*places[:: max(1, len(places) // 6)], places[-1]]:
        first, last_id = events[: place + 1], events[place][0]
        assert last_id is not None
        rest = read(http, call, **key, **{"last-event-id": last_id})
        assert rest[-1] == (None, {})
        had, then = by_output(first), by_output(rest)
        assert {output: had.get(output, []) + then.get(output, []) for output in whole} == whole
        assert [data["usage"] for _, data in first + rest if data.get("usage")] == (
            [events[-2][1]["usage"]] if extra is USAGE else []
        )


def test_events_have_ids_only_where_a_key_is_given(http: httpx2.Client) -> None:
    assert {event_id for event_id, _ in read(http, CHAT)} == {None}


def test_a_stream_that_breaks_is_resumed_while_it_goes_on(http: httpx2.Client) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "seed": 2, "max_tokens": 600, "ignore_eos": True}
    call = "/v1/completions", body | {"stream": True}
    whole = http.post("/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    key = {"idempotency-key": uuid.uuid4().hex}
    first = first_event(http, body, **key)  # leaves the stream
    rest = read(http, call, **key, **{"last-event-id": "1"})
    assert first["choices"][0]["text"] + "".join(each["text"] for each in by_output(rest)[0]) == whole


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"last-event-id": "3"}, 400, "invalid_value"),
        ({"last-event-id": "3,4", "idempotency-key": "new"}, 400, "invalid_value"),
        ({"last-event-id": "-3", "idempotency-key": "new"}, 400, "invalid_value"),
        ({"last-event-id": "x", "idempotency-key": "new"}, 400, "invalid_value"),
        ({"last-event-id": "3", "idempotency-key": "new"}, 409, "not_resumable"),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    http: httpx2.Client, headers: dict[str, str], status: int, code: str
) -> None:
    headers = {name: value.replace("new", uuid.uuid4().hex) for name, value in headers.items()}
    answers = [
        http.post(CHAT[0], json=CHAT[1], headers=headers),
        http.post("/v1/responses", json={"model": MODEL, "input": "x", "stream": True}, headers=headers),
    ]
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, "last-event-id")


def test_an_answer_without_events_is_not_resumed(http: httpx2.Client) -> None:
    bodies = {CHAT[0]: {**CHAT[1], "stream": False}, "/v1/responses": {"model": MODEL, "input": "x", "seed": 1}}
    for path, body in bodies.items():
        key = {"idempotency-key": uuid.uuid4().hex}
        assert http.post(path, json=body, headers=key).status_code == 200
        answer = http.post(path, json=body, headers=key | {"last-event-id": "3"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "last-event-id") and "stream: true" in error["message"]


def test_each_event_has_the_usage_so_far_if_asked_for(api: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chat = list(api.chat.completions.create(**CHAT[1], stream_options=options))
    completion = list(api.completions.create(**COMPLETION[1], stream_options=options))
    for events in (chat, completion):
        usages: list[Any] = [event.usage for event in events]
        counts = [usage.completion_tokens for usage in usages]
        assert counts == sorted(counts) and counts[-2:] == [counts[-1]] * 2
        assert len({usage.prompt_tokens for usage in usages}) == 1
    options = {"continuous_usage_stats": True}
    alone = list(api.chat.completions.create(**CHAT[1], stream_options=options))
    assert all(event.usage is not None and event.choices for event in alone)
