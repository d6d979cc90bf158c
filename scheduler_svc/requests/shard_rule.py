"""Rule for the new requests of a shard while the number of shards changes, so that no request id is accepted twice.

A client says by which version of the numbers it has chosen this shard, after it has looked for the id in the shards
that it belonged to before. Two schedulers that know different versions therefore never both take the id: the one with
the earlier version does not answer the look, and the one with the later one does not take what was chosen by the
earlier.
"""

from typing import Protocol

from quire.errors import ShardsChangedError
from quire.shards import shard_of_id
from scheduler_svc.journal.shard_plan import ShardPlan


class SeenPlan(Protocol):
    """The numbers of shards as this process knows them."""

    @property
    def plan(self) -> ShardPlan:
        """The latest plan that was read."""

    @property
    def plan_read_s(self) -> float:
        """Time at which the last successful reading of the plan began, on the loop's clock."""

    @property
    def is_several(self) -> bool:
        """True if there are several shards, or may have been."""


class ShardRule:
    """One per leader of a shard."""

    def __init__(self, shard: int, seen: SeenPlan, led_since_s: float) -> None:
        """`led_since_s`: when this process had begun to lead: a plan that it read before may be too old."""
        self._shard = shard
        self._seen = seen
        self._led_since_s = led_since_s

    @property
    def is_several(self) -> bool:
        """True if there are several shards, or may have been."""
        return self._seen.is_several

    def check_new(self, request_id: str, version: int) -> None:
        """Check that the shard takes a new request, which was sent here by this version; 0: by none.

        Where numbers have changed, an id may have been sent to the shard of a former number, in which the client had
        found a request whose record has expired since: it belongs to another shard now.

        Raises ShardsChangedError.
        """
        plan = self._seen.plan
        if self._shard >= plan.num_shards:
            raise ShardsChangedError(
                f"shard {self._shard} takes no new requests; {plan.num_shards} of the deployment's shards do",
                version=plan.version,
            )
        if version and (version != plan.version or not self._is_fresh):
            raise self._changed()
        if version and plan.former and shard_of_id(request_id, plan.num_shards) != self._shard:
            raise self._changed()

    def check_known(self, version: int) -> None:
        """Check that this process knows this version or a later one; 0: any. Raises ShardsChangedError."""
        if version and (version > self._seen.plan.version or not self._is_fresh):
            raise self._changed()

    @property
    def _is_fresh(self) -> bool:
        return self._seen.plan_read_s >= self._led_since_s

    def _changed(self) -> ShardsChangedError:
        return ShardsChangedError(
            "the number of shards changes at the moment; ask for the shards again", version=self._seen.plan.version
        )
