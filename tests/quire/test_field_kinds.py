"""Values that a field cannot hold: refused by the SDK in the caller's terms, whatever the value and the call."""

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

import quire
from quire.params import BeamParams, OutputParams, RequestParams, SamplingParams, StopParams, StructuredOutput
from quire.wire_requests import request_to_pb

# Words of Python and protobuf, which tell a caller nothing.
RIDDLES = re.compile(r"object (has|cannot)|google|bad argument|argument type|codec|not (iterable|supported)|Assignment")
ODD_VALUES: list[Any] = [
    b"x",
    [b"x"],
    {"a": "b"},
    {1: "x"},
    1.5,
    "x",
    [None],
    [[1]],
    2**70,
    [2**70],
    "\ud800",
    ["\ud800"],
]
KEYWORDS = [
    field.name
    for kind in (SamplingParams, StopParams, OutputParams, StructuredOutput, RequestParams)
    for field in fields(kind)
    if field.name not in ("sampling", "stopping", "output", "beam", "structured_output")
]
BEAM_KEYWORDS = [field.name for field in fields(BeamParams)]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_tokens": -1}, "max_tokens: is -1: give at least 0"),
        ({"top_k": 2**40}, f"top_k: is {2**40}: give at most"),
        ({"temperature": [0.5]}, "temperature: cannot be [0.5]: give a number"),
        ({"ignore_eos": "yes"}, "ignore_eos: cannot be 'yes': give True or False"),
        ({"stop": 5}, "stop: cannot be 5: give a list of texts"),
        ({"stop_token_ids": 7}, "stop_token_ids: cannot be 7: give a list of whole numbers from "),
        ({"logit_bias": {"a": 1}}, "logit_bias: cannot be {'a': 1}: give a dict of whole numbers to numbers"),
        ({"request_id": 5}, "request_id: cannot be 5: give a text"),
        ({"annotation": "x"}, "annotation: cannot be 'x': give bytes"),
        ({"choice": "yes"}, "choice: cannot be 'yes': give a list of texts"),
        ({"choice": 5}, "choice: cannot be 5: give a list of texts"),
        ({"timeout_s": "1"}, "timeout_s: cannot be '1': give a number of seconds"),
        ({"n": True}, "n: cannot be True: give a whole number"),
        ({"seed": -1}, "seed: is -1: give at least 0"),
        ({"seed": 2**70}, f"seed: is {2**70}: give at most"),
        ({"stop": "\udcff"}, "stop: has characters that UTF-8 cannot encode"),
        ({"tenant": "\udcff"}, "tenant: has characters that UTF-8 cannot encode"),
    ],
)
async def test_what_a_field_cannot_hold_is_told_with_what_it_can(
    client: quire.AsyncClient, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(quire.InvalidRequestError, match="^" + re.escape(told)):
        await client.generate("hello", **given)


@pytest.mark.parametrize("keyword", KEYWORDS)
async def test_no_keyword_of_a_request_answers_an_odd_value_with_a_riddle(
    client: quire.AsyncClient, keyword: str
) -> None:
    for value in ODD_VALUES:
        await plainly_refused(lambda value=value: client.generate("hello", **{keyword: value}))  # type: ignore[misc]


@pytest.mark.parametrize("keyword", BEAM_KEYWORDS)
async def test_no_keyword_of_a_beam_search_does(client: quire.AsyncClient, keyword: str) -> None:
    for value in ODD_VALUES:
        given = {"beam_width": 2, keyword: value}
        await plainly_refused(lambda given=given: client.generate("hello", **given))  # type: ignore[misc]


@pytest.mark.parametrize("call", ["cancel", "pause", "resume", "get", "unpin_prefix", "drain_worker", "detokenize"])
async def test_no_other_call_does(client: quire.AsyncClient, call: str) -> None:
    for value in ODD_VALUES:
        await plainly_refused(lambda value=value: getattr(client, call)(value))  # type: ignore[misc]


async def test_attaching_with_an_odd_id_or_position_is_refused_before_it_reaches_the_stream_of_all_requests(
    client: quire.AsyncClient,
) -> None:
    with pytest.raises(quire.InvalidRequestError, match=r"^request_id: has characters that UTF-8 cannot encode"):
        client.attach("\ud800")
    with pytest.raises(
        quire.InvalidRequestError, match=r"^from_position: cannot be 1\.5: give a list of whole numbers"
    ):
        client.attach("known", 1.5)  # type: ignore[arg-type]
    with pytest.raises(quire.InvalidRequestError, match=r"^from_position: cannot be \[-1\]: .* from 0 to"):
        client.attach("known", -1)


async def plainly_refused(call: Callable[[], Any]) -> None:
    """Make a call with a value that is refused here, or by the server, or not at all."""
    try:
        await call()
    except quire.QuireError as error:
        assert not RIDDLES.search(error.message), error.message


@pytest.mark.parametrize("choice", [["a", "b"], ("a", "b"), {"a": 1, "b": 2}.keys(), (each for each in "ab")])
def test_any_iterable_of_texts_is_a_list_of_choices(choice: Any) -> None:
    request = request_to_pb("x", RequestParams(structured_output=StructuredOutput(choice=choice)))
    assert list(request.structured_output.choice.texts) == ["a", "b"]
