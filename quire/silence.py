"""Silence about an open request: when to attach anew, and when its connection cannot be trusted any more.

A message can be lost while its stream, and every ping, goes on as before: a bit that flips in a frame's stream id is
enough. Each unfruitful attempt doubles the patience, so that a long queue costs little. Knows no wire and no clock.
"""

from typing import Literal

ASK_AFTER_S = 4.0  # of silence about a request that was answered; attaching again loses nothing
ANSWER_S = 6.0  # for the answer to a submission or an attachment; a server that is slow gives one within 5 s
LONGEST_S = 80.0  # that patience grows to

Verdict = Literal["wait", "ask", "renew"]


class Silence:
    """What was heard of one request."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._is_answered = False
        self._ask_after_s = ASK_AFTER_S
        self._answer_s = ANSWER_S

    def note_asked(self, now_s: float) -> None:
        """It was submitted or attached to, and an answer is due."""
        self._since_s, self._is_answered = now_s, False

    def note_answered(self, now_s: float) -> None:
        """The server knows of it."""
        self._since_s, self._is_answered = now_s, True
        self._answer_s = ANSWER_S

    def note_output(self, now_s: float) -> None:
        """It gets on."""
        self.note_answered(now_s)
        self._ask_after_s = ASK_AFTER_S

    def verdict(self, now_s: float) -> Verdict:
        """What to do now; "ask": attach again on this stream, "renew": on another connection. Each is said once."""
        quiet_s = now_s - self._since_s
        if self._is_answered and quiet_s >= self._ask_after_s:
            self._ask_after_s = min(2 * self._ask_after_s, LONGEST_S)
            return "ask"
        if not self._is_answered and quiet_s >= self._answer_s:
            self._answer_s = min(2 * self._answer_s, LONGEST_S)
            return "renew"
        return "wait"
