"""Backoff between a client's attempts to open its session: short while another server may be about to lead."""

import random

FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0
FAILOVER_S = 5.0  # after a break, attempts are made at least every FAILOVER_BACKOFF_S
FAILOVER_BACKOFF_S = 0.15
SETTLED_S = 3.0  # a stream that lived longer counts as a connection, not as a failed attempt


class ReconnectBackoff:
    """The backoff of one session."""

    def __init__(self, now_s: float) -> None:
        self._backoff_s = FIRST_BACKOFF_S
        self._quick_until_s = now_s + FAILOVER_S

    def record_server_reached(self, now_s: float) -> None:
        """Reset the backoff: a server answered."""
        self._quick_until_s = now_s + FAILOVER_S

    def pause_s(self, now_s: float, *, lived_s: float, leader_is_known: bool) -> float:
        """Pause before the next attempt, after a stream that lived `lived_s`."""
        if leader_is_known or lived_s > SETTLED_S:
            self._backoff_s = FIRST_BACKOFF_S
        else:
            last_s = FAILOVER_BACKOFF_S if now_s < self._quick_until_s else LAST_BACKOFF_S
            self._backoff_s = min(2 * self._backoff_s, last_s)
        return self._backoff_s * random.uniform(0.5, 1.0)
