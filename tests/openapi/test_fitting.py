"""Bodies fitted to the gateway's own document, without a server."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.gateway.described import DOCUMENT, schema
from tests.gateway.hostile_bodies import BODIES, TURNS
from tests.openapi.fitting import Fitting
from tests.openapi.meaning import make_sense, shorten

FITTING = Fitting(DOCUMENT)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def properties(method: str, path: str) -> dict[str, Any]:
    body = DOCUMENT["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
    reference = body.get("$ref") or next(each["$ref"] for each in body["anyOf"] if "$ref" in each)
    described: dict[str, Any] = DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    return described


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_a_body_that_fits_is_not_changed(method: str, path: str) -> None:
    body = BODIES[method, path]
    assert FITTING.body(method, path, body) == body


def test_what_the_server_does_not_offer_is_left_out_at_its_place() -> None:
    image = {"type": "input_image", "image_url": "http://example.com/x.png"}
    text = {"type": "input_text", "text": "Hi"}
    message = {"role": "user", "content": [image, text]}
    given = {"input": [message, {"type": "computer_call"}], "conversation": "c", "foo": 1, "temperature": 1.0}
    fitted = FITTING.body("POST", "/v1/responses", given)
    assert fitted == {"input": [{"role": "user", "content": [text]}], "temperature": 1.0}


@settings(max_examples=200)
@given(data=st.data(), place=st.sampled_from(sorted(BODIES)))
def test_each_property_of_a_fitted_body_is_valid(data: st.DataObject, place: tuple[str, str]) -> None:
    described = properties(*place)
    names = st.sampled_from(sorted(described)) | st.text(max_size=3)
    values = _json | st.just(TURNS) | st.just([{"type": "function", "function": {"name": "f"}}, 3])
    fitted = FITTING.body(*place, data.draw(st.dictionaries(names, values)))
    for name, value in fitted.items():
        assert Draft202012Validator(schema(described[name])).is_valid(value), name


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_a_body_makes_sense_whatever_it_lacks(method: str, path: str) -> None:
    for number in range(20):
        made = make_sense({}, path, number)
        assert FITTING.body(method, path, made) == made


def test_outputs_are_short_and_deadlines_far() -> None:
    body = {"max_tokens": 900, "max_completion_tokens": None, "timeout_s": 1e-300}
    shorten(body, "/v1/chat/completions")
    assert body == {"max_tokens": 4, "max_completion_tokens": 4, "timeout_s": 60}
    body = {"timeout_s": -1}  # is refused
    shorten(body, "/v1/responses")
    assert body == {"timeout_s": -1, "max_output_tokens": 4}
