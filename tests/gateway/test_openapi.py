"""The OpenAPI document beside the application: it has each route and each field, and answers are as it says."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from jsonschema import Draft202012Validator

from gateway_svc.openapi.answers import ANSWERS
from gateway_svc.request_fields import ApiModel
from tests.gateway.described import APP, DOCUMENT, OPERATIONS, check_described
from tests.gateway.hostile_bodies import BODIES, TURNS, place
from tests.gateway.reciter import TOOLS, asking

COMPLETION = BODIES["POST", "/v1/completions"]
CHAT = BODIES["POST", "/v1/chat/completions"]
RESPONSE = BODIES["POST", "/v1/responses"]
MESSAGE = BODIES["POST", "/v1/messages"]
BOUND_BY_MODEL = {"max_tokens", "min_tokens"}  # its context is shorter than the bound


def models(kind: type[ApiModel] = ApiModel) -> Iterator[type[ApiModel]]:
    for each in kind.__subclasses__():
        yield each
        yield from models(each)


def test_each_route_is_described_and_each_description_is_of_a_route() -> None:
    assert set(OPERATIONS) == ANSWERS.keys()
    for method, path in OPERATIONS:
        scope = {"type": "http", "method": method.upper(), "path": place(path), "headers": []}
        assert any(route.matches(scope)[0].name == "FULL" for route in APP.routes), path


def test_each_field_of_a_body_is_described_and_each_description_is_of_a_field() -> None:
    described = DOCUMENT["components"]["schemas"]
    compared = 0
    for model in set(models()):
        full = f"{model.__module__}.{model.__qualname__}".replace(".", "__")
        schema = described.get(full, described.get(model.__name__))
        if schema is None:
            continue  # a base of bodies
        names = {field.alias or name for name, field in model.model_fields.items()}
        assert names == schema["properties"].keys(), model
        assert schema.get("additionalProperties", True) is (model.model_config.get("extra") == "ignore")
        assert set(schema.get("required", ())) == {
            field.alias or name for name, field in model.model_fields.items() if field.is_required()
        }
        compared += 1
    assert compared > 30


def test_each_body_is_one_of_the_compared_models() -> None:
    for method, path in BODIES:
        schema = DOCUMENT["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
        assert "#/components/schemas/" in str(schema)


def test_headers_of_the_routes_are_described() -> None:
    def headers(method: str, path: str) -> set[str]:
        given = DOCUMENT["paths"][path][method].get("parameters", ())
        return {each["name"] for each in given if each["in"] == "header"}

    assert headers("post", "/v1/completions") == {"idempotency-key", "last-event-id"}
    assert headers("post", "/v1/messages") == {"idempotency-key"}
    assert headers("get", "/v1/responses/{response_id}") == {"last-event-id"}
    assert headers("get", "/v1/models") == {"anthropic-version"}


def test_schemas_are_valid() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_the_gateway_serves_the_document(http: httpx2.Client) -> None:
    assert http.get("/openapi.json").json() == DOCUMENT


def bounds() -> Iterator[tuple[str, float, float]]:
    """Name, bound and a value beyond it, of each number of a completion."""
    for name, described in DOCUMENT["components"]["schemas"]["CompletionRequest"]["properties"].items():
        for one in described.get("anyOf", ()):
            for key, beyond in (("minimum", -1), ("maximum", 1)):
                if key in one:
                    step = 0.5 if one["type"] == "number" else 1
                    yield name, one[key], one[key] + beyond * step
            if "exclusiveMinimum" in one:
                yield name, one["exclusiveMinimum"] + 0.5, one["exclusiveMinimum"]


@pytest.mark.parametrize(("name", "bound", "beyond"), list(bounds()))
def test_described_bounds_are_those_enforced(http: httpx2.Client, name: str, bound: float, beyond: float) -> None:
    with_beam = {"beam_width": 2} if name == "length_penalty" else {}
    refused = http.post("/v1/completions", json={**COMPLETION, **with_beam, name: beyond})
    assert (refused.status_code, name in refused.text) == (400, True)
    if name not in BOUND_BY_MODEL:
        answer = http.post("/v1/completions", json={**COMPLETION, **with_beam, name: bound})
        assert answer.status_code == 200 or f"{name} is" not in answer.text.replace(":", ""), answer.text


STREAMED = {"stream": True}
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("post", "/v1/completions", {"json": COMPLETION}),
    ("post", "/v1/completions", {"json": {**COMPLETION, "echo": True, "logprobs": 2, "return_token_ids": True}}),
    ("post", "/v1/completions", {"json": {**COMPLETION, "prompt_logprobs": 1, "return_token_ids": True}}),
    ("post", "/v1/completions", {"json": {**COMPLETION, **STREAMED, "stream_options": {"include_usage": True}}}),
    ("post", "/v1/completions", {"json": {**COMPLETION, "stop": [1]}}),
    ("post", "/v1/chat/completions", {"json": {**CHAT, "logprobs": True, "top_logprobs": 2}}),
    ("post", "/v1/chat/completions", {"json": {**CHAT, "prompt_logprobs": 1, "return_token_ids": True}}),
    ("post", "/v1/chat/completions", {"json": {**CHAT, **STREAMED, "logprobs": True, "return_token_ids": True}}),
    ("post", "/v1/chat/completions", {"json": {**CHAT, "messages": [None]}}),
    ("post", "/v1/responses", {"json": {**RESPONSE, "include": ["message.output_text.logprobs"], "top_logprobs": 1}}),
    ("post", "/v1/responses", {"json": {**RESPONSE, **STREAMED}}),
    ("post", "/v1/responses", {"json": {**RESPONSE, "background": True}}),
    ("post", "/v1/responses", {"json": {**RESPONSE, "tools": [3]}}),
    ("get", "/v1/responses/{response_id}", {}),
    ("post", "/v1/messages", {"json": MESSAGE}),
    ("post", "/v1/messages", {"json": {**MESSAGE, **STREAMED}}),
    ("post", "/v1/messages", {"json": {**MESSAGE, "tools": [3]}}),
    ("post", "/v1/messages", {"json": {**MESSAGE, "thread": {"id": "x"}}}),
    ("post", "/v1/messages/count_tokens", {"json": {"messages": TURNS}}),
    ("get", "/v1/models", {}),
    ("get", "/v1/models", {"headers": {"anthropic-version": "2023-06-01"}}),
    ("get", "/v1/models/{name}", {"headers": {"anthropic-version": "2023-06-01"}}),
    ("post", "/tokenize", {"json": {"prompt": "x", "return_token_strs": True}}),
    ("post", "/detokenize", {"json": {"tokens": [5]}}),
    ("get", "/requests", {}),
    ("get", "/requests", {"params": {"page_size": 0}}),
    ("get", "/requests/{request_id}", {}),
    ("put", "/prefixes/{name}", {"json": BODIES["PUT", "/prefixes/{name}"]}),
    ("put", "/prefixes/{name}", {}),
    ("get", "/prefixes", {"params": {"tenant": "hostile"}}),
    ("delete", "/prefixes/{name}", {"params": {"tenant": "hostile"}}),
    ("get", "/health", {}),
    ("get", "/ping", {}),
    ("post", "/ping", {}),
    ("get", "/version", {}),
    ("get", "/ready", {}),
    ("get", "/metrics", {}),
]


@pytest.mark.parametrize(("method", "path", "given"), CALLS)
def test_answers_are_as_described(http: httpx2.Client, method: str, path: str, given: dict[str, Any]) -> None:
    answer = http.request(method, place(path.replace("response_id", "request_id")), **given)
    check_described(method, path, answer)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"tools": [{"name": "weather", "input_schema": {"type": "object"}}]}),
        ("/v1/messages", {"thinking": {"type": "adaptive", "display": "omitted"}}),
        ("/v1/chat/completions", {"tools": TOOLS}),
        ("/v1/chat/completions", {"tools": TOOLS, "tool_choice": "required"}),
        ("/v1/responses", {"tools": [{"type": "function", **TOOLS[0]["function"]}]}),
    ],
)
def test_answers_with_calls_and_reasoning_are_as_described(
    reciter: tuple[str, str], path: str, fields: dict[str, Any], streamed: bool
) -> None:
    turns = "call" if path == "/v1/responses" else asking("call")
    bound = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"input" if path == "/v1/responses" else "messages": turns, bound: 300, "temperature": 0, **fields}
    answer = httpx2.post(f"{reciter[1]}{path}", json=body | {"stream": streamed}, timeout=60)
    assert answer.status_code == 200
    check_described("post", path, answer)


def test_the_life_of_a_response_is_as_described(http: httpx2.Client) -> None:
    made = http.post("/v1/responses", json={**RESPONSE, "max_output_tokens": 3}).json()["id"]
    whole = "/v1/responses/{response_id}"
    here = f"/v1/responses/{made}"
    check_described("get", whole, http.get(here))
    check_described("get", whole, http.get(here, params={"stream": True}))
    check_described("get", f"{whole}/input_items", http.get(f"{here}/input_items"))
    check_described("post", f"{whole}/cancel", http.post(f"{here}/cancel"))
    check_described("get", "/requests/{request_id}", http.get(f"/requests/{made}"))
    check_described("delete", whole, http.delete(here))


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_another_method_is_refused_and_the_right_ones_are_named(http: httpx2.Client, method: str, path: str) -> None:
    answer = http.patch(place(path.replace("response_id", "request_id")))
    assert answer.status_code == 405
    methods = sorted(each.upper() for each in DOCUMENT["paths"][path])
    assert answer.headers["allow"].split(", ") == methods + ["HEAD"] * ("GET" in methods)
    assert answer.json()["error"]["message"].startswith("Method Not Allowed")
