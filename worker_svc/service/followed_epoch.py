"""The epoch that a worker follows: the highest of the recent answers to its registration.

A store that lost its contents counts epochs from the start again. A worker that had seen a higher epoch would then
refuse every step until it is restarted. So an epoch that no scheduler has answered with for `forget_after_s` is
forgotten. Pure.
"""

FORGET_AFTER_S = 10.0  # several leases: a live leader has answered in this time


class FollowedEpoch:
    """The followed epoch; 0 until the first answer."""

    def __init__(self, forget_after_s: float = FORGET_AFTER_S) -> None:
        self.epoch = 0
        self._forget_after_s = forget_after_s
        self._confirmed_s = 0.0  # when a scheduler last answered with it

    def confirm_epoch(self, epoch: int, now_s: float) -> bool:
        """Records the epoch that a leading scheduler answered with. Returns True if the followed epoch has changed."""
        if epoch < self.epoch and now_s <= self._confirmed_s + self._forget_after_s:
            return False  # of a former leader that may not know of its successor yet
        is_new = epoch != self.epoch
        self.epoch, self._confirmed_s = epoch, now_s
        return is_new

    def forget(self) -> None:
        """Forget the epoch: the worker follows the scheduler of another shard."""
        self.epoch = 0
