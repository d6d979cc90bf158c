"""Connections that break, retries with the same key, and the end of a gateway."""

import json
import signal
import time
import uuid
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

import quire
from tests.gateway.conftest import MODEL
from tests.patience import patient
from tests.services import start_gateway

LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}


def eventually(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait until it holds."""
    end_s = time.monotonic() + patient(limit_s)
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def first_event(http: httpx2.Client, fields: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The first event of a stream, which is then left."""
    with http.stream("POST", "/v1/completions", json=fields | {"stream": True}, headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        line = next(line for line in answer.iter_lines() if line.startswith("data: "))
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        return event


def test_events_are_lines_of_data_that_end_with_done(http: httpx2.Client) -> None:
    fields = {"model": MODEL, "prompt": "x", "max_tokens": 2, "stream": True}
    lines = http.post("/v1/completions", json=fields).text.split("\n\n")
    assert lines.pop() == ""
    assert lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: {") for line in lines)


def test_a_reader_that_leaves_cancels_its_request(http: httpx2.Client, sdk: quire.Client) -> None:
    request_id = first_event(http, LONG)["id"]
    eventually(lambda: sdk.get(request_id).state is quire.RequestState.CANCELLED)


def test_a_reader_of_a_whole_answer_that_leaves_cancels_its_request(url: str, sdk: quire.Client) -> None:
    key = uuid.uuid4().hex
    reader = HTTPConnection(urlsplit(url).netloc)
    reader.request("POST", "/v1/completions", json.dumps(LONG | {"tenant": key}), {"content-type": "application/json"})
    eventually(lambda: bool(sdk.list_requests(tenant=key).requests))
    sdk.pause(sdk.list_requests(tenant=key).requests[0].request_id)  # however fast the machine is, it does not end
    reader.close()
    eventually(lambda: not sdk.list_requests(tenant=key).requests)


def test_a_request_may_go_on_without_its_reader(http: httpx2.Client, sdk: quire.Client) -> None:
    fields = LONG | {"max_tokens": 60, "on_disconnect": "continue"}
    request_id = first_event(http, fields, **{"idempotency-key": uuid.uuid4().hex})["id"]
    eventually(lambda: sdk.get(request_id).state is quire.RequestState.FINISHED)
    assert len(sdk.get(request_id).token_ids) == 60


def test_a_retry_with_the_same_key_reads_the_same_request(http: httpx2.Client, sdk: quire.Client) -> None:
    fields = LONG | {"max_tokens": 400, "temperature": 1.0}  # no seed: another request would have another text
    key = {"idempotency-key": uuid.uuid4().hex}
    first = first_event(http, fields, **key)
    answers = [http.post("/v1/completions", json=fields, headers=key, timeout=60).json() for _ in range(2)]
    assert [each["id"] for each in answers] == [first["id"]] * 2
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["choices"][0]["text"].startswith(first["choices"][0]["text"])
    assert sdk.get(first["id"]).text == answers[0]["choices"][0]["text"]


def test_a_key_of_another_request_is_refused(http: httpx2.Client) -> None:
    key = {"idempotency-key": uuid.uuid4().hex}
    fields = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    assert http.post("/v1/completions", json=fields, headers=key).status_code == 200
    other = http.post("/v1/completions", json=fields | {"prompt": "y"}, headers=key)
    error = other.json()["error"]
    assert (other.status_code, error["code"], error["param"]) == (409, "idempotency_key_reused", "idempotency-key")
    assert "Idempotency-Key" in error["message"] and "request_id" not in error["message"]  # of which HTTP has none
    assert http.post("/v1/completions", json=fields | {"tenant": "another"}, headers=key).status_code == 200


def test_a_key_that_is_too_long_is_refused_by_name(http: httpx2.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x"}, headers={"idempotency-key": "k" * 257})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "idempotency-key")


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/v1/messages", "messages"),
    ],
)
def test_headers_without_a_value_are_as_good_as_missing(http: httpx2.Client, path: str, given: str) -> None:
    bound = "max_output_tokens" if given == "input" else "max_tokens"
    empty = {"idempotency-key": "", "last-event-id": ""}
    ids = []
    for words in ("Hello!", "Hello!", "Who are you?"):
        prompt = [{"role": "user", "content": words}] if given == "messages" else words
        body = {"model": MODEL, given: prompt, bound: 2, "stream": True}
        answer = http.post(path, json=body, headers=empty)
        assert answer.status_code == 200, answer.text
        ids.append(answer.headers["request-id" if path == "/v1/messages" else "x-request-id"])
    assert len(set(ids)) == 3


def test_a_deadline_that_passes_is_the_last_event(http: httpx2.Client) -> None:
    fields = LONG | {"timeout_s": 0.5, "stream": True}
    *_, last, done = [line for line in http.post("/v1/completions", json=fields).text.split("\n\n") if line]
    assert done == "data: [DONE]"
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "deadline_exceeded"
    whole = http.post("/v1/completions", json=LONG | {"timeout_s": 0.5})
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_a_gateway_that_is_told_to_end_lets_answers_end(deployment: tuple[str, str]) -> None:
    gateway, url = start_gateway(deployment[0])
    with gateway, httpx2.Client(base_url=url, timeout=60) as http:
        fields = LONG | {"max_tokens": 300, "stream": True}
        with http.stream("POST", "/v1/completions", json=fields) as answer:
            lines = (line for line in answer.iter_lines() if line)
            found = [next(lines)]
            gateway.signal(signal.SIGTERM)
            found += lines
        assert found[-1] == "data: [DONE]"
        last = json.loads(found[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert gateway.wait() == 0


def test_several_gateways_share_a_port(deployment: tuple[str, str]) -> None:
    first, url = start_gateway(deployment[0], "--shares-port")
    with first:
        port = url.rpartition(":")[2]
        second, _ = start_gateway(deployment[0], "--shares-port", "--listen", f"127.0.0.1:{port}")
        with second:
            first.stop()
            assert httpx2.get(f"{url}/ready", timeout=patient(60)).status_code == 200
        third, _ = start_gateway(deployment[0], "--listen", f"127.0.0.1:{port}")
        third.stop()
