"""Requests and prefixes under Quire's own paths, beside the same by the SDK."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

import quire
from tests.patience import patient

LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0.9, "seed": 1}


@contextmanager
def running(sdk: quire.Client) -> Iterator[str]:
    """Id of a request that has had its first output; cancelled in the end."""
    with sdk.stream("Once upon a time", **LONG) as stream:
        next(iter(stream))
        yield stream.request_id


def wait_for_state(http: httpx2.Client, request_id: str, state: str) -> dict[str, Any]:
    until_s = time.monotonic() + patient(20)
    found: dict[str, Any] = {}
    while found.get("state") != state:
        found = http.get(f"/requests/{request_id}").json()
        assert time.monotonic() < until_s, found
        time.sleep(0.02)
    return found


def test_a_request_is_listed_paused_resumed_and_cancelled(http: httpx2.Client, sdk: quire.Client) -> None:
    with running(sdk) as request_id:
        listed = http.get("/requests", params={"state": ["running", "queued"]}).json()["data"]
        assert request_id in [each["request_id"] for each in listed]
        assert http.post(f"/requests/{request_id}/pause", json={"keep": "tokens"}).json() == {"state": "paused"}
        paused = wait_for_state(http, request_id, "paused")
        assert paused["samples"][0]["text"]
        assert paused["samples"][0]["finish_reason"] is None
        assert http.get("/requests", params={"state": "paused"}).json()["data"][0]["request_id"] == request_id
        assert http.post(f"/requests/{request_id}/resume").status_code == 200
        assert http.post(f"/requests/{request_id}/cancel").json() == {"state": "cancelled"}
        ended = wait_for_state(http, request_id, "cancelled")
        assert ended["usage"]["completion_tokens"] > 0


def test_a_page_of_requests_names_the_next(http: httpx2.Client, sdk: quire.Client) -> None:
    with running(sdk) as first, running(sdk) as second:
        page = http.get("/requests", params={"page_size": 1}).json()
        rest = http.get("/requests", params={"page_token": page["next_page_token"]}).json()
        assert [each["request_id"] for each in page["data"] + rest["data"]] == [first, second]


def test_what_does_not_exist_is_not_found(http: httpx2.Client) -> None:
    for method, path in (("GET", ""), ("POST", "/cancel"), ("POST", "/pause"), ("POST", "/resume")):
        answer = http.request(method, f"/requests/nobody{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert http.delete("/prefixes/nobody").status_code == 404


@pytest.mark.parametrize("query", [{"page_size": 0}, {"page_size": "x"}, {"state": "asleep"}])
def test_a_wrong_query_is_named(http: httpx2.Client, query: dict[str, Any]) -> None:
    answer = http.get("/requests", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(query))


def test_a_prefix_is_pinned_listed_used_and_unpinned(http: httpx2.Client, sdk: quire.Client) -> None:
    prefix = "Once upon a time there was a clever boy named Anton. He lived with his aunt close to the harbour. " * 3
    body = {"prompt": prefix, "tenant": "pins"}
    first, again = http.put("/prefixes/rules", json=body), http.put("/prefixes/rules", json=body)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["num_blocks"] > 0
    other = http.put("/prefixes/rules", json={**body, "prompt": "Another one. " * 20})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "already_exists")
    [listed] = http.get("/prefixes", params={"tenant": "pins"}).json()["data"]
    assert listed["name"] == "rules"
    used = http.post("/v1/completions", json={"prompt": prefix + "He", "max_tokens": 1, "tenant": "pins"}).json()
    assert used["usage"]["prompt_tokens_details"]["cached_tokens"] >= listed["num_tokens"]
    assert http.delete("/prefixes/rules", params={"tenant": "pins"}).status_code == 204
    assert http.get("/prefixes", params={"tenant": "pins"}).json() == {"data": []}
    assert sdk.list_prefixes(tenant="pins") == ()


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}])
def test_a_pin_needs_one_form_of_its_prefix(http: httpx2.Client, body: dict[str, Any]) -> None:
    answer = http.put("/prefixes/none", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
