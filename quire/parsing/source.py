"""Text that arrives in pieces, for parsers written as generators: they yield where it runs out, and go on with more.

What a parser reads depends on the text alone, never on the pieces: nothing is consumed before it is decided. A parser
that tries a reading may go back to where it began. Knows no format.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

MAX_HELD_CHARS = 16_384  # that a try may read before it is decided: more than any name and its surroundings

T = TypeVar("T")
Reading = Generator[None, None, T]


class MismatchError(Exception):
    """The text is not what the format says here."""


class Markers:
    """Strings to look for, of which none begins another."""

    def __init__(self, *markers: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._beginnings = {each[:size] for each in markers for size in range(1, len(each))}
        self._firsts = {each[0] for each in markers}
        self._longest = max(map(len, markers)) - 1

    def find(self, text: str, begin: int) -> "re.Match[str] | None":
        return self._pattern.search(text, begin)

    def num_held(self, text: str, begin: int) -> int:
        """Length of the longest end of the text that may be the beginning of a marker."""
        tail = text[max(begin, len(text) - self._longest) :]
        if self._firsts.isdisjoint(tail):
            return 0
        for start in range(len(tail)):
            if tail[start:] in self._beginnings:
                return len(tail) - start
        return 0


class Source:
    """Text from the place that was read to."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._tried_from: int | None = None
        self._max_tried = MAX_HELD_CHARS
        self._is_ended = False

    def feed(self, text: str) -> None:
        """Add text."""
        kept_from = self._at if self._tried_from is None else self._tried_from
        self._text = self._text[kept_from:] + text
        self._at -= kept_from
        if self._tried_from is not None:
            self._tried_from = 0

    def end(self) -> None:
        """Tell that no more text comes."""
        self._is_ended = True

    def begin_try(self, max_chars: int = MAX_HELD_CHARS) -> None:
        """Keep what is read from here on, at most so much, until it is decided."""
        self._tried_from = self._at
        self._max_tried = max_chars

    def keep_reading(self) -> None:
        """Decide that the try succeeded."""
        self._tried_from = None

    def go_back(self) -> None:
        """Return to where an undecided try began; without one stay."""
        if self._tried_from is not None:
            self._at, self._tried_from = self._tried_from, None

    def ahead(self, num_chars: int) -> Reading[str]:
        """The next characters, not consumed: so many, or fewer at the end."""
        while len(self._text) - self._at < num_chars and not self._is_ended:
            yield
        return self._text[self._at : self._at + num_chars]

    def skip(self, num_chars: int) -> None:
        """Consume characters that lie ahead. Raises MismatchError if an undecided try is too long."""
        self._at += num_chars
        if self._tried_from is not None and self._at - self._tried_from > self._max_tried:
            raise MismatchError

    def take(self, literal: str) -> Reading[bool]:
        """True if the literal was next; it is consumed then."""
        for size in range(1, len(literal) + 1):  # no more is waited for than decides
            if (yield from self.ahead(size)) != literal[:size]:
                return False
        self.skip(len(literal))
        return True

    def expect(self, literal: str) -> Reading[None]:
        """Consume a literal. Raises MismatchError if something else is next."""
        if not (yield from self.take(literal)):
            raise MismatchError

    def run(self, pattern: "re.Pattern[str]", emit: Callable[[str], None] | None = None) -> Reading[None]:
        """Consume the longest run of characters that the pattern, a repeated set, matches; `emit` gets it in pieces."""
        while True:
            if not (yield from self.ahead(1)):
                return
            found = pattern.match(self._text, self._at)
            end = self._at if found is None else found.end()
            if emit is not None and end > self._at:
                emit(self._text[self._at : end])
            self.skip(end - self._at)
            if self._at < len(self._text):
                return

    def collect(self, pattern: "re.Pattern[str]") -> Reading[str]:
        """The longest run of characters that the pattern matches, as `run` consumes it."""
        pieces: list[str] = []
        yield from self.run(pattern, pieces.append)
        return "".join(pieces)

    def until(self, markers: Markers, emit: Callable[[str], None]) -> Reading[str]:
        """Consume the text before the first marker, which `emit` gets in pieces, and the marker.

        Returns the marker; empty if the text ended without one.
        """
        while True:
            found = markers.find(self._text, self._at)
            if found is not None:
                self._pass(found.start(), emit)
                self.skip(len(found.group()))
                return found.group()
            num_held = 0 if self._is_ended else markers.num_held(self._text, self._at)
            self._pass(len(self._text) - num_held, emit)
            if self._is_ended:
                return ""
            yield

    def rest(self, emit: Callable[[str], None]) -> Reading[None]:
        """Consume all text to the end, which `emit` gets in pieces."""
        while (yield from self.ahead(1)):
            self._pass(len(self._text), emit)

    def collect_until(self, markers: Markers) -> Reading[tuple[str, str]]:
        """The text before the first marker and the marker. Raises MismatchError where the text ends without one."""
        pieces: list[str] = []
        marker = yield from self.until(markers, pieces.append)
        if not marker:
            raise MismatchError
        return "".join(pieces), marker

    def first_of(self, literals: Sequence[str]) -> Reading[str]:
        """The literal that was next and is consumed. Raises MismatchError if none was."""
        for each in literals:
            if (yield from self.take(each)):
                return each
        raise MismatchError

    def _pass(self, end: int, emit: Callable[[str], None]) -> None:
        if end > self._at:
            begin = self._at
            self.skip(end - begin)
            emit(self._text[begin:end])
