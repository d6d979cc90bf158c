"""Refusals, failures and lost connections of messages, in Anthropic's shape."""

import json
import uuid
from typing import Any

import anthropic
import httpx2
import pytest

import quire
from tests.gateway.conftest import MODEL
from tests.gateway.test_messages import QUESTION, events_of
from tests.gateway.test_streams import eventually
from tests.services import free_address, start_gateway

FIELDS: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 5}
LONG = FIELDS | {"max_tokens": 1500, "ignore_eos": True}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}


def error_of(answer: httpx2.Response) -> tuple[int, str, str]:
    """Status, type and message of an error, whose shape is Anthropic's."""
    body = answer.json()
    assert (set(body), body["type"]) == ({"type", "error", "request_id"}, "error")
    assert set(body["error"]) == {"type", "message"}
    assert answer.headers["request-id"] == body["request_id"] != ""
    return answer.status_code, body["error"]["type"], body["error"]["message"]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**7}, "input length and `max_tokens` exceed context limit: 7 + 10000000 > 2048: max_tokens"),
        ({"messages": [{"role": "user", "content": "hello " * 3000}]}, "prompt is too long"),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, "prompt is too long"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"system": [{"type": "document"}]}, "system[0].type: this server does not support content of type 'document'"),
        ({"system": [{"type": 5}]}, "system[0].type"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "wrong"}}}}, "output_config.format"),
        (
            {
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
                "structured_outputs": {"choice": ["x"]},
            },
            "structured_outputs",
        ),
        ({"tools": {}}, "tools"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management.edits[0].keep"),
        (
            {
                "context_management": {
                    "edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]
                }
            },
            "context_management.edits[0].keep",
        ),
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"n": 2}, "n"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_wrong_or_unsupported_field_is_named(http: httpx2.Client, extra: dict[str, Any], named: str) -> None:
    status, kind, message = error_of(http.post("/v1/messages", json=FIELDS | extra))
    assert (status, kind) == (400, "invalid_request_error")
    assert named in message


def test_fields_without_effect_are_accepted(http: httpx2.Client) -> None:
    extra = {
        "metadata": {"user_id": "someone"},
        "cache_control": {"type": "ephemeral"},
        "service_tier": "auto",
        "thinking": {"type": "disabled"},
        "tools": None,
        "context_management": {
            "edits": [
                {"type": "clear_thinking_20251015", "keep": "all"},
                {"type": "clear_thinking_20251015", "keep": {"type": "all"}},
            ]
        },
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "any", "x-api-key": "any"}
    assert http.post("/v1/messages?beta=true", json=FIELDS | extra, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"{}", b'{"messages": {}}'])
def test_a_body_that_is_no_request_is_refused(http: httpx2.Client, path: str, body: bytes) -> None:
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert error_of(answer)[:2] == (400, "invalid_request_error")


def test_another_model_is_not_found(http: httpx2.Client) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = FIELDS | {"model": "claude"} if path == "/v1/messages" else {"model": "claude", "messages": QUESTION}
        assert error_of(http.post(path, json=body))[:2] == (404, "not_found_error")
    version = {"anthropic-version": "2023-06-01"}
    assert error_of(http.get("/v1/models/claude", headers=version))[:2] == (404, "not_found_error")


def test_only_anthropics_paths_have_its_shape(http: httpx2.Client) -> None:
    assert error_of(http.post("/v1/messages/batches"))[:2] == (404, "not_found_error")
    assert error_of(http.get("/v1/messages"))[:2] == (405, "invalid_request_error")
    for path in ("/v1/models/claude", "/v1/messagesque"):
        assert "param" in http.get(path).json()["error"]


def test_a_body_beyond_the_bound_is_too_large(http: httpx2.Client) -> None:
    large = b'{"system": "' + b"x" * (17 << 20) + b'"}'
    chunks = (large[start : start + 65_536] for start in range(0, len(large), 65_536))
    for content in (large, chunks):
        answer = http.post("/v1/messages", content=content, headers={"content-type": "application/json"})
        assert error_of(answer)[:2] == (413, "request_too_large")


def test_without_a_scheduler_the_server_is_overloaded() -> None:
    gateway, url = start_gateway(free_address(), "--scheduler-timeout-s", "0.5")
    with gateway, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**FIELDS)
        assert (caught.value.status_code, caught.value.type) == (529, "overloaded_error")
        assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_deadline_that_passes_is_an_error(http: httpx2.Client, sdk: quire.Client) -> None:
    answer = http.post("/v1/messages", json=LONG | {"timeout_s": 0.5})
    assert error_of(answer)[:2] == (504, "timeout_error")
    assert sdk.get(answer.json()["request_id"]).state is quire.RequestState.EXPIRED
    events = events_of(http, LONG | {"timeout_s": 0.5})
    name, data = events[-1]
    assert (name, data["type"], data["error"]["type"]) == ("error", "error", "timeout_error")
    assert data["request_id"] == events[0][1]["message"]["id"]


def test_a_retry_with_the_same_key_reads_the_same_message(http: httpx2.Client) -> None:
    fields = FIELDS | {"temperature": 1.0, "max_tokens": 20}  # no seed: another request would have another text
    key = {"idempotency-key": uuid.uuid4().hex}
    first, second = (http.post("/v1/messages", json=fields, headers=key).json() for _ in range(2))
    assert (first["id"], first["content"]) == (second["id"], second["content"])
    other = http.post("/v1/messages", json=fields | {"system": "Be kind."}, headers=key)
    assert error_of(other)[:2] == (409, "invalid_request_error")


@pytest.mark.parametrize(
    ("on_disconnect", "state"), [("cancel", quire.RequestState.CANCELLED), ("continue", quire.RequestState.FINISHED)]
)
def test_a_reader_that_leaves_cancels_its_message_or_lets_it_go_on(
    http: httpx2.Client, sdk: quire.Client, on_disconnect: str, state: quire.RequestState
) -> None:
    key = {"idempotency-key": uuid.uuid4().hex} if on_disconnect == "continue" else {}
    num_tokens = 60 if on_disconnect == "continue" else 1500
    fields = LONG | {"stream": True, "max_tokens": num_tokens, "on_disconnect": on_disconnect}
    with http.stream("POST", "/v1/messages", json=fields, headers=key) as answer:
        assert next(answer.iter_lines()) == "event: message_start"
        request_id = answer.headers["request-id"]
    eventually(lambda: sdk.get(request_id).state is state)


def test_a_message_that_is_cancelled_is_not_to_blame(http: httpx2.Client, sdk: quire.Client) -> None:
    with http.stream("POST", "/v1/messages", json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: message_start"
        sdk.cancel(answer.headers["request-id"])
        *_, last = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["error"]["message"].endswith("cancelled")
