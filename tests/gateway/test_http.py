"""Behaviour that clients of HTTP expect of any server: HEAD, calls of scripts on web pages, bodies of other types."""

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from quire.gateway_settings import GatewaySettings
from quire.settings import parse
from tests.gateway.conftest import MODEL
from tests.gateway.hostile_bodies import BODIES, place
from tests.services import free_address, start_gateway

PAGE = "https://page.example"
ROUTES = pytest.mark.parametrize(("method", "path"), BODIES)
BODY = b'{"prompt": "x", "max_tokens": 1}'


@pytest.fixture(scope="module")
def open_to_page() -> Iterator[httpx2.Client]:
    """Client of a gateway that scripts of PAGE may call, with a key that it has; it has no scheduler."""
    gateway, url = start_gateway(
        *(free_address(), "--cors-origins", f"http://other.example:81, {PAGE}", "--scheduler-timeout-s", "0.2"),
        env={"QUIRE_API_KEY": "sk-page"},
    )
    with gateway, httpx2.Client(base_url=url, headers={"authorization": "Bearer sk-page"}) as client:
        yield client


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{MODEL}", "/requests"])
def test_head_is_get_without_its_body(http: httpx2.Client, path: str) -> None:
    whole, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers.get("content-type") == whole.headers.get("content-type")
    assert "content-length" in head.headers


def test_head_of_what_is_not_there_is_refused(http: httpx2.Client) -> None:
    assert http.head("/v1/nothing").status_code == 404
    refused = http.head("/v1/completions")
    assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST", b"")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    "path", ["/ready", "/metrics", "/v1/models", "/v1/models/none", "/requests", "/v1/responses/none", "/prefixes"]
)
def test_no_cache_may_keep_what_was_read(http: httpx2.Client, method: str, path: str) -> None:
    assert http.request(method, path).headers["cache-control"] == "no-store"


def test_no_cache_may_keep_a_response_that_grows_and_belongs_to_a_caller(http: httpx2.Client) -> None:
    begun = http.post("/v1/responses", json={"model": MODEL, "input": "x", "background": True, "max_output_tokens": 1})
    path = f"/v1/responses/{begun.json()['id']}"
    for each in (path, f"{path}/input_items", f"{path}?stream=true"):
        assert http.get(each).headers["cache-control"] in ("no-store", "no-cache"), each


def test_no_cache_may_keep_what_was_refused_for_want_of_a_key(open_to_page: httpx2.Client) -> None:
    refused = httpx2.get(f"{open_to_page.base_url}/v1/models")
    assert (refused.status_code, refused.headers["cache-control"]) == (401, "no-store")


def test_a_path_with_a_slash_behind_it_is_not_found(http: httpx2.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"].keys() - {"/v1/models/{name}"}  # names may have slashes
    assert "/v1/models" in paths
    for path in paths:
        slashed = re.sub(r"\{\w+\}", "x", path) + "/"
        answer = http.get(slashed)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"Not Found: GET {slashed}"


def preflight(client: httpx2.Client, origin: str, **more: str) -> httpx2.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        **more,
    }
    return client.request("OPTIONS", "/v1/chat/completions", headers=headers)


def test_a_script_of_an_allowed_page_may_call(open_to_page: httpx2.Client) -> None:
    with httpx2.Client(base_url=open_to_page.base_url) as without_key:  # as browsers ask first
        asked = preflight(without_key, PAGE)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
    for path, status in (("/health", 200), ("/nothing", 404), ("/v1/models", 503)):
        answer = open_to_page.get(path, headers={"origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        assert "retry-after" in answer.headers["access-control-expose-headers"]


def test_an_allowed_page_of_the_internet_may_call_a_server_of_a_private_network(open_to_page: httpx2.Client) -> None:
    private = {"access-control-request-private-network": "true"}  # as Chrome asks before it calls 127.0.0.1
    asked = preflight(open_to_page, PAGE, **private)
    assert (asked.status_code, asked.headers["access-control-allow-private-network"]) == (200, "true")
    assert preflight(open_to_page, "https://evil.example", **private).status_code == 400


def test_a_script_of_another_page_may_not(open_to_page: httpx2.Client, http: httpx2.Client) -> None:
    assert preflight(open_to_page, "https://evil.example").status_code == 400
    answer = open_to_page.get("/health", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert preflight(http, PAGE).status_code == 405  # none, unless the operator says so
    assert "access-control-allow-origin" not in http.get("/health", headers={"origin": PAGE}).headers


@pytest.mark.parametrize("origins", ["page.example", "https://page.example/chat", "https://a, b"])
def test_what_is_no_origin_is_refused_at_the_start(origins: str) -> None:
    with pytest.raises(ValueError, match=r"--cors-origins: .* is no origin"):
        parse(GatewaySettings, ["--cors-origins", origins])


@ROUTES
@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/octet-stream"])
def test_a_body_of_another_type_is_refused_with_the_type_to_send(
    http: httpx2.Client, method: str, path: str, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = http.request(method, place(path), content=BODY, headers=headers)
    assert answer.status_code == 415
    assert "'content-type: application/json'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/problem+json"]
)
def test_types_of_json_are_read(http: httpx2.Client, kind: str) -> None:
    assert http.post("/v1/completions", content=BODY, headers={"content-type": kind}).status_code == 200


def test_a_compressed_body_is_refused_by_its_name(http: httpx2.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = http.post("/v1/completions", content=b"\x1f\x8b\x08", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-encoding")
    for coding in ("identity", "Identity", ""):
        plain = {"content-type": "application/json", "content-encoding": coding}
        assert http.post("/v1/completions", content=BODY, headers=plain).status_code == 200


def test_a_body_that_may_be_missing_needs_no_type(http: httpx2.Client) -> None:
    assert http.post("/requests/nobody/pause").status_code == 404
    assert http.post("/requests/nobody/pause", content=iter([])).status_code == 404  # in chunks, of which none comes


def test_a_body_in_chunks_is_checked_and_read(http: httpx2.Client) -> None:
    answer = http.post("/v1/completions", content=iter([BODY[:5], BODY[5:]]))
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-type")
    kind = {"content-type": "application/json"}
    assert http.post("/v1/completions", content=iter([BODY[:5], BODY[5:]]), headers=kind).status_code == 200


@pytest.mark.parametrize("name", ["foo bar", "Temperature", "0", "naïve", "", "x" * 5000])
@pytest.mark.parametrize(
    ("within", "place"),
    [
        ([], ""),
        (["messages", 0], "messages[0]."),
        (["messages", 0, "content", 0], "messages[0].content[0]."),
        (["stream_options"], "stream_options."),
        (["tool_choice", "function"], "tool_choice.function."),
    ],
)
def test_an_unknown_field_is_named_whatever_its_name(
    http: httpx2.Client, name: str, within: list[Any], place: str
) -> None:
    part: dict[str, Any] = {"type": "text", "text": "Hi"}
    body: Any = {"model": MODEL, "messages": [{"role": "user", "content": [part]}], "stream_options": {}}
    body["tool_choice"] = {"type": "function", "function": {"name": "f"}}
    here = body
    for each in within:
        here = here[each]
    here[name] = 1
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["code"] == "unknown_parameter"
    assert error["param"] == place + name[:80]
    assert len(error["message"]) < 200
