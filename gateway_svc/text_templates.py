"""Templates of JSON that differs in one text alone, as the events of a stream's tokens do.

A template is made of what it stands for, with a mark for the text, so that an event is described once.
"""

import uuid
from collections.abc import Callable

import orjson

_MARK = uuid.uuid4().hex  # a text that nobody has
_MARK_JSON = orjson.dumps(_MARK)


class TextTemplates:
    """Templates by number, each made when it is first filled."""

    def __init__(self, make: Callable[[int, str], bytes]) -> None:
        """`make` makes the bytes of a number and a text; they have the text once, as JSON."""
        self._make = make
        self._made: dict[int, tuple[bytes, bytes]] = {}

    def fill(self, number: int, text: str) -> bytes:
        """The bytes that are made of a number and a text."""
        template = self._made.get(number)
        if template is None:
            before, after = self._make(number, _MARK).split(_MARK_JSON)
            template = self._made[number] = before, after
        return template[0] + orjson.dumps(text) + template[1]
