"""Grammars of a worker's seats on a thread of their own, where they follow tokens and make masks while passes compute.

Work is done in the order of the calls, none of which waits but `Masks.wait`. Knows no rows of logits and no device.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from common.step import SequenceState
from worker_svc.sampling.grammar_matcher import GrammarVocabulary, SeatMatcher, WordArray
from worker_svc.steps.step_check import IntArray

# A grammar nests as deep as its author likes, and is compiled by recursion. The scheduler compiles it first, with a
# stack of 1 MiB: `scheduler_svc/text/grammar_program.py`.
_STACK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Matched:
    """Seats with a grammar among some seats: their places among them, and their matchers at that time."""

    rows: IntArray
    matchers: tuple[SeatMatcher, ...]


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks that are being made, for `rows`."""

    rows: IntArray
    _words: "Future[WordArray]"

    def wait(self) -> WordArray:
        """Tokens that can be chosen, int32 [len(rows), ceil(V / 32)], a bit each."""
        return self._words.result()


class SeatGrammars:
    """Grammars of all seats of one worker. Only the thread that executes steps calls it."""

    def __init__(self, read_vocabulary: Callable[[], GrammarVocabulary]) -> None:
        """`read_vocabulary` runs on the thread, at once: it takes up to seconds."""
        self._matchers: dict[int, SeatMatcher] = {}
        self._looks_ahead = False  # once tokens were asked for that grammars force: not every runner does
        self._thread = _thread_with_deep_stack()
        self._vocabulary = self._thread.submit(read_vocabulary)

    def apply(self, whole: Sequence[SequenceState]) -> None:
        """Place the seats that a checked step describes."""
        for state in whole:
            earlier = self._matchers.pop(state.seat, None)
            if state.sampling.grammar:
                matcher = self._matchers[state.seat] = SeatMatcher(
                    state.sampling.grammar, forces=state.sampling.forces_text
                )
                self._thread.submit(self._begin, matcher, _output(state), earlier)

    def matched(self, seats: IntArray) -> Matched | None:
        """Seats with a grammar among these; None if there are none."""
        if not self._matchers:
            return None
        rows = [row for row, seat in enumerate(seats.tolist()) if seat in self._matchers]
        if not rows:
            return None
        return Matched(np.array(rows), tuple(self._matchers[seat] for seat in seats[rows].tolist()))

    def masks(self, matched: Matched | None) -> Masks | None:
        """Begin to make the masks of the next tokens."""
        if matched is None:
            return None
        return Masks(matched.rows, self._thread.submit(self._make_masks, matched.matchers))

    def force(self, seats: Sequence[int], rooms: Sequence[int]) -> list[list[int]]:
        """Follow tokens that come next because the grammars allow no other, at most `rooms` beside `seats`; wait."""
        self._looks_ahead = True
        return self._thread.submit(_force, [self._matchers[seat] for seat in seats], rooms).result()

    def follow(self, matched: Matched | None, token_ids: Sequence[int]) -> None:
        """Follow the tokens that were sampled, one for each of the seats that `matched` was made from."""
        if matched is None:
            return
        sampled = [token_ids[row] for row in matched.rows.tolist()]
        self._thread.submit(_follow, matched.matchers, sampled, self._looks_ahead)

    def _begin(self, matcher: SeatMatcher, output: Sequence[int], earlier: SeatMatcher | None) -> None:
        matcher.begin(self._vocabulary.result(), output, earlier)

    def _make_masks(self, matchers: Sequence[SeatMatcher]) -> WordArray:
        return self._vocabulary.result().masks(matchers)


def _output(state: SequenceState) -> Sequence[int]:
    """Output tokens that the state knows. The prompt, which may be long, is not copied."""
    first = state.num_prompt_tokens
    return [*state.history[first:], *state.token_ids[max(0, first - len(state.history)) :]]


def _follow(matchers: Sequence[SeatMatcher], token_ids: Sequence[int], looks_ahead: bool) -> None:
    for matcher, token_id in zip(matchers, token_ids, strict=True):
        matcher.follow([token_id])
    for matcher in matchers if looks_ahead else ():
        if matcher.forces:
            matcher.look_ahead()


def _force(matchers: Sequence[SeatMatcher], rooms: Sequence[int]) -> list[list[int]]:
    return [matcher.force(room) for matcher, room in zip(matchers, rooms, strict=True)]


def _thread_with_deep_stack() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(1, "grammars")
    before = threading.stack_size(_STACK_BYTES)
    try:
        pool.submit(int).result()  # starts the thread
    finally:
        threading.stack_size(before)
    return pool
