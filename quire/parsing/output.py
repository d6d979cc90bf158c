"""Deltas as a parser finds them: neighbours of one kind are one, whitespace around calls and reasoning is dropped.

Knows no format. The whitespace that ends a text is held until it is known whether a call follows.
"""

from collections.abc import Callable

from quire.parsing.deltas import ArgumentsDelta, ContentDelta, Delta, ReasoningDelta, ToolCallBegun

_MAX_HELD_SPACE = 4096  # characters in a row; a longer row is text like any other


class Output:
    """Deltas that were found and not taken yet. `call_id` makes the id of a call from its index."""

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self.num_calls = 0
        self._call_id = call_id
        self._deltas: list[Delta] = []
        self._kind: Callable[[str], Delta] | None = None  # of the pieces
        self._pieces: list[str] = []
        self._content = _Trimmed(lambda text: self._add(ContentDelta, text))
        self._reasoning = _Trimmed(lambda text: self._add(ReasoningDelta, text))

    def content(self, text: str) -> None:
        """Add text of the answer."""
        self._content.push(text)

    def begin_reasoning(self) -> None:
        """Drop the whitespace around the marker at which reasoning begins."""
        self._content.cut()
        self._reasoning.cut()

    def reasoning(self, text: str) -> None:
        """Add text of the reasoning."""
        self._reasoning.push(text)

    def end_reasoning(self) -> None:
        """Drop the whitespace around the marker at which reasoning ends."""
        self._reasoning.cut()
        self._content.cut()

    def begin_call(self, name: str) -> None:
        """Begin the next call, and drop the whitespace around it."""
        self._content.cut()
        self._flush()
        self._deltas.append(ToolCallBegun(self.num_calls, self._call_id(self.num_calls), name))
        self.num_calls += 1
        self._arguments_kind = lambda text, index=self.num_calls - 1: ArgumentsDelta(index, text)

    def arguments(self, text: str) -> None:
        """Add text to the arguments of the last call."""
        self._add(self._arguments_kind, text)

    def end(self) -> None:
        """Add the whitespace that ends the answer."""
        self._reasoning.flush()
        self._content.flush()

    def take(self) -> tuple[Delta, ...]:
        """The deltas since the last call of this, which are forgotten here."""
        self._flush()
        taken, self._deltas = tuple(self._deltas), []
        return taken

    def _add(self, kind: Callable[[str], Delta], text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        if self._kind is not None and (text := "".join(self._pieces)):
            self._deltas.append(self._kind(text))
        self._pieces, self._kind = [], None


class _Trimmed:
    """Text without whitespace at its ends; of that around a cut what stood before it is left, if text follows."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._held = ""  # whitespace
        self._has_text = False
        self._drops = False  # whitespace, until there is text
        self._is_long = False  # the present row of whitespace

    def push(self, text: str) -> None:
        if self._drops:
            text = text.lstrip()
        if not text:
            return
        self._drops = False
        words = text.rstrip()
        if words:
            self._has_text = True
            self._emit(self._held + words)
            self._held, self._is_long = "", False
        self._held += text[len(words) :]
        if self._is_long or len(self._held) > _MAX_HELD_SPACE:
            self._is_long = True
            self.flush()

    def cut(self) -> None:
        self._drops, self._is_long = True, False
        if not self._has_text:
            self._held = ""

    def flush(self) -> None:
        if self._held and not self._drops:
            self._emit(self._held)
            self._held = ""
