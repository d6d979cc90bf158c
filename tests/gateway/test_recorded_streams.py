"""Streams of the four APIs, byte by byte as they were recorded, however their events are made and sent."""

import pytest

from tests.gateway.recorded_streams import FOLDER, RECORDED


@pytest.mark.parametrize("name", RECORDED)
async def test_a_stream_is_as_it_was_recorded(name: str) -> None:
    answer = await RECORDED[name].answer()
    assert answer == (FOLDER / f"{name}.http").read_bytes()


def test_each_recorded_stream_is_compared() -> None:
    assert {each.stem for each in FOLDER.iterdir()} == set(RECORDED)
