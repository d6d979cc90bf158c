"""Hostile bodies: whatever a client sends to a route is answered in the shape of its API, never with a fault."""

import json
import re
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quire
from gateway_svc.app import create_app
from gateway_svc.json_body import MAX_DEPTH, decode_json
from tests.gateway.hostile_bodies import BODIES, check_answer, place

ROUTES = pytest.mark.parametrize(("method", "path"), BODIES)
HUGE = [2**31, 2**63, 10**300]
ODD: list[Any] = ["\u0000", [None], [3], [{"type": []}], {"": None}]
DEEP: Any = json.loads("[" * (MAX_DEPTH - 3) + "]" * (MAX_DEPTH - 3))

# Small numbers and huge ones: those between would only be long outputs.
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from(HUGE),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
_keys = st.sampled_from(["type", "text", "role", "content", "name", "function", "id", "schema", "0", ""]) | st.text(
    max_size=4
)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3), max_leaves=8
)


def send(http: httpx2.Client, method: str, path: str, data: bytes) -> httpx2.Response:
    return http.request(method, place(path), content=data, headers={"content-type": "application/json"})


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return create_app(quire.AsyncClient("127.0.0.1:1"), max_body_bytes=1 << 20)


def fields() -> list[tuple[str, str, str]]:
    """Method, path and name of each field of each body."""
    made = create_app(quire.AsyncClient("127.0.0.1:1"), max_body_bytes=1 << 20).openapi()
    found = []
    for method, path in BODIES:
        schema = made["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
        ref = schema.get("$ref") or next(each["$ref"] for each in schema["anyOf"] if "$ref" in each)
        found += [(method, path, name) for name in made["components"]["schemas"][ref.rpartition("/")[2]]["properties"]]
    return found


FIELDS = fields()


def test_each_route_with_a_body_is_tried() -> None:
    made = create_app(quire.AsyncClient("127.0.0.1:1"), max_body_bytes=1 << 20).openapi()["paths"]
    taking = {
        (method.upper(), path)
        for path, operations in made.items()
        for method, operation in operations.items()
        if "requestBody" in operation
    }
    assert taking == BODIES.keys()


@ROUTES
def test_the_body_itself_is_accepted(http: httpx2.Client, method: str, path: str) -> None:
    answer = send(http, method, path, json.dumps(BODIES[method, path]).encode())
    check_answer(answer)
    assert answer.status_code in (200, 201, 404, 500), answer.text


@ROUTES
@pytest.mark.parametrize(
    "value",
    [
        b'"\\ud800"',
        b'["a\\udfff"]',
        b'{"\\ud800": 1}',
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"[" * 90_000,
        b'"\xff"',
        b"1" * 5_000,
    ],
)
def test_what_is_no_json_is_refused_wherever_it_stands(
    http: httpx2.Client, method: str, path: str, value: bytes
) -> None:
    for data in (value, b'{"model": ' + value + b"}", b'{"metadata": {"x": [' + value + b"]}}"):
        answer = send(http, method, path, data)
        check_answer(answer)
        assert answer.status_code == 400


@ROUTES
def test_deep_json_is_refused_before_anything_copies_it(http: httpx2.Client, method: str, path: str) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        deep = opening * 600 + b"1" + closing * 600
        answer = send(http, method, path, b'{"user": ' + deep + b"}")
        check_answer(answer)
        assert answer.status_code == 400
        assert "within each other" in answer.text


def test_depth_counts_and_width_does_not() -> None:
    assert decode_json(b"[" + b",".join([b"[]"] * 1000) + b"]")
    assert decode_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(json.JSONDecodeError, match="within each other"):
        decode_json(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


@pytest.mark.long
@pytest.mark.parametrize(("method", "path", "name"), FIELDS)
def test_odd_values_of_a_field_are_no_fault(http: httpx2.Client, method: str, path: str, name: str) -> None:
    for value in (*ODD, HUGE[0], HUGE[-1], DEEP, [], "", "\u0000" * 9000):
        answer = send(http, method, path, json.dumps({**BODIES[method, path], name: value}).encode())
        check_answer(answer)
        check_named(answer, method, path)


def check_named(answer: httpx2.Response, method: str, path: str) -> None:
    """Fails if a refusal names a field that the body does not have."""
    if answer.status_code == 400 and (param := answer.json()["error"].get("param")) is not None:
        names = {name for each_method, each_path, name in FIELDS if (each_method, each_path) == (method, path)}
        found = re.match(r"\w+", param)
        assert found is not None and found[0] in names, f"{param} of {path}: {answer.text[:300]}"


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place_=st.sampled_from(FIELDS), value=_values)
def test_no_value_of_any_field_is_a_fault(http: httpx2.Client, place_: tuple[str, str, str], value: Any) -> None:
    method, path, name = place_
    check_answer(send(http, method, path, json.dumps({**BODIES[method, path], name: value}).encode()))
