"""Streams of the four APIs, byte by byte as they were recorded, however their events are made and sent."""

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from tests.gateway.recorded_streams import FOLDER, RECORDED


@pytest.mark.parametrize("name", RECORDED)
async def test_a_stream_is_as_it_was_recorded(name: str) -> None:
    answer = await RECORDED[name].answer()
    assert answer == (FOLDER / f"{name}.http").read_bytes()


def test_each_recorded_stream_is_compared() -> None:
    assert {each.stem for each in FOLDER.iterdir()} == set(RECORDED)


@pytest.mark.parametrize("name", ["chat-calls-at-once", "chat-keyed-calls", "chat-keyed-call-cut"])
async def test_the_stream_helper_of_openai_tells_that_calls_are_whole(name: str) -> None:
    lines = (await RECORDED[name].answer()).replace(b'"created":0000000000', b'"created":0').splitlines()
    state, begun, whole = ChatCompletionStreamState(), set(), set()
    for line in [each.removeprefix(b"data: ") for each in lines if each.startswith(b"data: {")]:
        for event in state.handle_chunk(ChatCompletionChunk.model_validate_json(line)):
            if event.type == "tool_calls.function.arguments.delta":
                begun.add(event.index)
            elif event.type == "tool_calls.function.arguments.done":
                whole.add(event.index)
    assert begun and whole == begun
