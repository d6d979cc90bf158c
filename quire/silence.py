"""Silence about an open request: when to attach again, and when to give its connection up.

A message can be lost while its stream and every ping go on as before: a flipped bit in a frame's stream id is
enough. Each attempt without effect doubles the patience, so that a long queue costs little. Knows no wire and no clock.
"""

from typing import Literal

ASK_AFTER_S = 4.0  # silence about an answered request before attaching again, which loses nothing
ANSWER_S = 6.0  # wait for the answer to a submission or an attachment; even a slow server answers within 5 s
LONGEST_S = 80.0  # longest patience

Action = Literal["wait", "ask", "renew"]


class Silence:
    """The silence of one request."""

    __slots__ = ("_answer_s", "_ask_after_s", "_is_answered", "_since_s")

    def __init__(self) -> None:
        self._since_s = 0.0
        self._is_answered = False
        self._ask_after_s = ASK_AFTER_S
        self._answer_s = ANSWER_S

    def record_request(self, now_s: float) -> None:
        """Record that the request was submitted or attached to: an answer is due."""
        self._since_s, self._is_answered = now_s, False

    def record_answer(self, now_s: float) -> None:
        """Record that the server knows the request."""
        self._since_s, self._is_answered = now_s, True
        self._answer_s = ANSWER_S

    def record_output(self, now_s: float) -> None:
        """Record output: the request progresses."""
        self.record_answer(now_s)
        self._ask_after_s = ASK_AFTER_S

    def next_action(self, now_s: float) -> Action:
        """Action to take now, returned once; "ask": attach again on this stream, "renew": on a new connection."""
        quiet_s = now_s - self._since_s
        if self._is_answered and quiet_s >= self._ask_after_s:
            self._ask_after_s = min(2 * self._ask_after_s, LONGEST_S)
            return "ask"
        if not self._is_answered and quiet_s >= self._answer_s:
            self._answer_s = min(2 * self._answer_s, LONGEST_S)
            return "renew"
        return "wait"
