"""Events of plain text in the four APIs, which are made of templates: each is the JSON of its object."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.app import create_app
from gateway_svc.text_templates import TextTemplates
from tests.gateway.scripted_client import Scripted, ScriptedClient, chunks_of
from tests.gateway.wire import WiredCall, unframed

TEXT = st.text(max_size=12) | st.sampled_from([" ", "\n\n", "%d %b", '"\\', "\u2028", "</think>", "\U0001f600"])
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 50},
}
CLIENT = ScriptedClient(Scripted(chunks=()))
APP = create_app(CLIENT, max_body_bytes=1 << 20)
PLACES: Mapping[str, tuple[Any, ...]] = {
    "/v1/completions": ("choices", 0, "text"),
    "/v1/chat/completions": ("choices", 0, "delta", "content"),
    "/v1/responses": ("delta",),
    "/v1/messages": ("delta", "text"),
}


async def streamed(path: str, pieces: Sequence[str]) -> list[bytes]:
    """Events of an answer with these tokens."""
    CLIENT.script = Scripted(chunks=chunks_of(pieces, has_ends=True))
    call = WiredCall(path=path, body=orjson.dumps({**BODIES[path], "stream": True}))
    await call.answer(APP)
    return unframed(call.wire.body).split(b"\n\n")[:-1]


def text_of(path: str, made: Any) -> str | None:
    """Text that an event adds; None if it is of another kind."""
    try:
        text = reduce(getitem, PLACES[path], made)
    except (KeyError, IndexError):
        return None
    return text if isinstance(text, str) else None


@pytest.mark.parametrize("path", BODIES)
@given(pieces=st.lists(TEXT, min_size=1, max_size=12))
async def test_an_event_is_the_json_of_its_object_and_all_of_them_are_the_text(path: str, pieces: list[str]) -> None:
    texts, shapes = [], set()
    for event in await streamed(path, pieces):
        *lines, data = event.split(b"\n")
        if data == b"data: [DONE]":
            continue
        made = orjson.loads(data.removeprefix(b"data: "))
        assert data == b"data: " + orjson.dumps(made), "no byte more or less"
        number, kind = made.get("sequence_number"), made.get("type")
        named = [f"id: {number}"] * (number is not None) + [f"event: {kind}"] * (kind is not None)
        assert b"\n".join(lines).decode().splitlines() == named
        if (text := text_of(path, made)) is not None:
            texts.append(text)
            reduce(getitem, PLACES[path][:-1], made)[PLACES[path][-1]] = ""
            made.pop("sequence_number", None)
            shapes.add(orjson.dumps(made))
    assert "".join(texts) == "".join(pieces)
    assert len(shapes) <= 3, "the first, the last, and the others are alike"


@given(number=st.integers(0, 127), text=st.text(), around=st.text())
def test_a_filled_template_is_what_would_be_made(number: int, text: str, around: str) -> None:
    def make(number: int, text: str) -> bytes:
        return orjson.dumps({"number": number, around: [text, around]})

    templates = TextTemplates(make)
    assert [templates.fill(number, each) for each in (text, around, text)] == [
        make(number, each) for each in (text, around, text)
    ]
