"""Finds the first of several strings in text that comes in pieces.

An automaton (Aho and Corasick, 1975): one step per character, whatever the number of strings, so that the outcome
does not depend on how the text was cut into pieces. It knows nothing of tokens.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """States are ints, 0 at the start. Immutable once built; a reader keeps its own state.

    `completed[state]` is the longest string that ends here. `num_held[state]` is how many of the last characters
    may yet become a string: the longest end of the text that is a proper beginning of one.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.completed: list[str | None] = [None]
        self.num_held: list[int] = [0]
        self._next: list[dict[str, int]] = [{}]
        self._fallback: list[int] = [0]  # the state of the longest end that is a beginning, too
        for each in strings:
            self._insert(each)
        self._link()

    def advance(self, state: int, char: str) -> int:
        """State after one more character."""
        following = self._next
        while state and char not in following[state]:
            state = self._fallback[state]
        return following[state].get(char, 0)

    def is_absent(self, text: str) -> bool:
        """True if no stop string can begin in `text`: a quick check, valid in state 0."""
        return self._next[0].keys().isdisjoint(text)

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            known = self._next[state].get(char)
            if known is None:
                known = self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.completed.append(None)
                self.num_held.append(0)
            state = known
        self.completed[state] = string

    def _link(self) -> None:
        """Breadth first: a state's fallback is shallower, so it is settled before it is needed."""
        queue = deque((child, 1) for child in self._next[0].values())
        while queue:
            state, depth = queue.popleft()
            fallback = self._fallback[state]
            self.num_held[state] = depth if self._next[state] else self.num_held[fallback]
            if self.completed[state] is None:
                self.completed[state] = self.completed[fallback]
            for char, child in self._next[state].items():
                self._fallback[child] = self.advance(fallback, char)
                queue.append((child, depth + 1))
