"""Requests with references to items: what they read, and keep of it."""

import asyncio
import dataclasses
import json
import weakref
from collections.abc import Sequence
from typing import Any, cast

import pytest
from pydantic import TypeAdapter

import quire
from common.bounds import MOST_ANNOTATION_BYTES
from gateway_svc.api_error import ApiError
from gateway_svc.openai.responses.annotation import Annotation, decode_annotation
from gateway_svc.openai.responses.item_references import ItemReferences
from gateway_svc.openai.responses.items import InputItem, InputMessage, ItemReference
from gateway_svc.openai.responses.output import Output
from gateway_svc.openai.responses.stored_responses import StoredResponse, StoredResponses
from gateway_svc.openai.responses.turns import turns_of
from gateway_svc.vocabulary import Vocabulary
from tests.gateway.test_response_annotations import FIRST_FIELDS

NUM_ITEMS = 1000


class FakeResponses:
    """Responses of any id with the same input, whose items it watches."""

    def __init__(self, contents: Sequence[str]) -> None:
        said = [{"role": "user", "content": each} for each in contents]
        self._data = Annotation.model_validate({**FIRST_FIELDS, "input": said}).encode()
        self._items: list[weakref.ref[Any]] = []
        self.num_found = 0
        self.most_alive = 0

    async def find(self, response_id: str) -> StoredResponse:
        self.most_alive = max(self.most_alive, self.num_alive)
        self.num_found += 1
        annotation = decode_annotation(self._data)
        assert annotation is not None
        self._items += map(weakref.ref, annotation.input)
        return StoredResponse(annotation, _record(response_id, self._data))

    @property
    def num_alive(self) -> int:
        """Items that were read and are still held."""
        self._items = [each for each in self._items if each() is not None]
        return len(self._items)


def _record(response_id: str, annotation: bytes) -> quire.RequestRecord:
    return quire.RequestRecord(
        request_id=response_id,
        state=quire.RequestState.FINISHED,
        samples=(),
        usage=quire.Usage(),
        timings=quire.Timings(),
        memory=quire.RequestMemory(),
        error="",
        created_unix_s=0.0,
        seed=0,
        tenant="",
        annotation=annotation,
    )


def resolved(stored: FakeResponses, item_ids: Sequence[str]) -> list[InputItem]:
    references = ItemReferences(cast(StoredResponses, stored), cast(Vocabulary, None))
    return asyncio.run(references.resolve([ItemReference(id=each) for each in item_ids], None))


def test_items_that_are_not_named_are_not_kept() -> None:
    stored = FakeResponses([f"Number {i}." for i in range(NUM_ITEMS)])
    ids = [f"msg_{number}-in-{place}" for place in (3, 5) for number in range(20)]
    items = resolved(stored, [*ids, ids[0]])
    assert [(each.id, each.content) for each in items if isinstance(each, InputMessage)] == [
        (each, f"Number {each[-1]}.") for each in (*ids, ids[0])
    ]
    assert stored.num_found == 20, "each response is read once"
    assert stored.most_alive <= NUM_ITEMS + len(ids)


@pytest.mark.parametrize(
    ("contents", "ids", "words", "most_found"),
    [
        (["x" * (MOST_ANNOTATION_BYTES - 1000), "y"], [f"msg_{i}-in-1" for i in range(200)], "33,554,432 bytes", 130),
        (["x" * 100_000], ["msg_1-in-0"] * 100, "8,388,608 characters", 1),
        (["x" * 100_000], [f"msg_{i}-in-0" for i in range(100)], "8,388,608 characters", 84),
        (["x"], [f"msg_{i}-in-0" for i in range(257)], "256 responses", 0),
    ],
)
def test_too_much_is_refused_before_more_is_read(
    contents: list[str], ids: list[str], words: str, most_found: int
) -> None:
    stored = FakeResponses(contents)
    with pytest.raises(ApiError, match=words) as caught:
        resolved(stored, ids)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "input", "invalid_value")
    assert stored.num_found <= most_found


def test_what_is_within_the_bounds_is_read() -> None:
    stored = FakeResponses(["x" * 100_000, json.dumps({"a": 1})])
    assert len(resolved(stored, [f"msg_{i}-in-1" for i in range(256)])) == 256


@pytest.mark.parametrize("is_thinking", [True, False])
def test_text_behind_a_call_is_of_the_same_turn_by_id_and_by_items(is_thinking: bool) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"{'<think>Hm.</think>' * is_thinking}First.\n{call}\nThen.{call}At last."
    parsers = {"tool_parser": "hermes", "reasoning_parser": "think", "tools": [{"type": "function", "name": "f"}]}
    annotation = Annotation.model_validate({**FIRST_FIELDS, **parsers})
    sample = quire.SampleOutput(index=0, text=text, token_ids=(1,), finish=None)
    record = dataclasses.replace(_record("resp_1", annotation.encode()), samples=(sample,))
    output = Output("resp_1", annotation, cast(Vocabulary, None), in_reasoning=False)
    output.add_text(text, 1)
    output.end()
    sent = [TypeAdapter(InputItem).validate_python(each.made("completed")) for each in output.items]
    assert [each.type for each in sent][-5:] == ["message", "function_call", "message", "function_call", "message"]
    [turn] = turns_of(sent)
    assert dataclasses.replace(turn, tool_calls=tuple(turn.tool_calls)) == StoredResponse(annotation, record).answer
