"""Which epoch a worker follows: the highest with which a scheduler has lately answered its registration.

A store that has lost its contents begins to count epochs anew. A worker that had seen a higher one would refuse every
step until it is started again; so an epoch that no scheduler has answered with for a while is followed no more. Pure.
"""

FORGET_AFTER_S = 10.0  # several leases: a leader that lives has answered in this time


class FollowedEpoch:
    """0 until the first answer."""

    def __init__(self, forget_after_s: float = FORGET_AFTER_S) -> None:
        self.epoch = 0
        self._forget_after_s = forget_after_s
        self._confirmed_s = 0.0  # when a scheduler last answered with it

    def note(self, epoch: int, now_s: float) -> bool:
        """A scheduler that leads answered with this epoch. Returns whether it is followed instead of another."""
        if epoch < self.epoch and now_s <= self._confirmed_s + self._forget_after_s:
            return False  # of a leader that has been followed, and may not know it yet
        is_new = epoch != self.epoch
        self.epoch, self._confirmed_s = epoch, now_s
        return is_new
