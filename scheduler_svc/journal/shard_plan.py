"""Number of shards of a deployment, and the numbers that it had: what the store keeps, and how it changes. Pure.

A request id belongs to a shard by the number of shards. A former number counts until nothing that was accepted under
it lives or has a record, so that an id that was accepted once is found.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.shards import MOST_SHARDS

_MOST_TEXT = 64 * 1024


class FormerNumber(NamedTuple):
    """Number of shards that took requests, until the version `last_version`."""

    num_shards: int
    last_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Numbers of shards, as of one version; each change makes a later one.

    The shards below `num_shards` take new requests. Those up to `num_wanted` are prepared for that. Those up to
    `num_kept` are led: removed ones finish what they have.
    """

    version: int
    num_shards: int
    num_wanted: int
    num_kept: int
    former: tuple[FormerNumber, ...] = ()  # the last first; each number once, and never the present one

    @classmethod
    def first(cls, num_shards: int) -> "ShardPlan":
        """Plan of a deployment that begins."""
        return cls(version=1, num_shards=num_shards, num_wanted=num_shards, num_kept=num_shards)

    @property
    def is_plain(self) -> bool:
        """True if there is one shard, and no trace of another."""
        return self.num_kept == 1 and not self.former

    @property
    def is_settled(self) -> bool:
        """True if nothing of a former number counts."""
        return self.num_kept == self.num_shards and not self.former

    def with_wanted(self, num_shards: int) -> "ShardPlan":
        """Plan for another number of shards; the same one if that is wanted already. Fewer count at once."""
        if num_shards == self.num_wanted:
            return self
        wanted = replace(self, num_wanted=num_shards, num_kept=max(self.num_kept, num_shards))
        return wanted._with_number(min(self.num_shards, num_shards))

    def with_ready(self) -> "ShardPlan":
        """Plan in which every wanted shard takes requests: each of them has a leader and a worker."""
        return self if self.num_shards == self.num_wanted else self._with_number(self.num_wanted)

    def without_settled(self, settled: Sequence[int]) -> "ShardPlan":
        """Plan without former numbers and removed shards of which nothing is left.

        `settled`: for each kept shard, the version before which all that it had accepted is gone; 0: not known.
        """
        least = min(settled[: self.num_kept], default=0)
        former = tuple(each for each in self.former if each.last_version >= least)
        num_kept = self.num_kept
        while num_kept > max(self.num_shards, self.num_wanted) and self._is_empty(num_kept - 1, settled):
            num_kept -= 1
        if former == self.former and num_kept == self.num_kept:
            return self
        return replace(self, version=self.version + 1, num_kept=num_kept, former=former)

    def merged_with(self, lost: "ShardPlan") -> "ShardPlan":
        """Later plan, where the store has this one in the place of one of the same version that it has lost.

        Requests may have been accepted by either, so the numbers of both count.
        """
        last: dict[int, int] = {}
        for number, version in (*self.former, *lost.former, FormerNumber(lost.num_shards, lost.version)):
            last[number] = max(version, last.get(number, 0))
        last.pop(self.num_shards, None)
        former = sorted((FormerNumber(*each) for each in last.items()), key=lambda each: -each.last_version)
        num_kept = max(self.num_kept, lost.num_kept)
        return replace(self, version=self.version + 1, num_kept=num_kept, former=tuple(former))

    def _with_number(self, num_shards: int) -> "ShardPlan":
        former = [each for each in self.former if each.num_shards not in (self.num_shards, num_shards)]
        if num_shards != self.num_shards:
            former.insert(0, FormerNumber(self.num_shards, self.version))
        return replace(self, version=self.version + 1, num_shards=num_shards, former=tuple(former))

    def _is_empty(self, shard: int, settled: Sequence[int]) -> bool:
        """True if nothing is left of what a removed shard had accepted while it took requests."""
        took = [each.last_version for each in self.former if each.num_shards > shard]
        return max(took, default=0) < settled[shard] or not took

    def __str__(self) -> str:
        numbers = f"{self.version} {self.num_shards} {self.num_wanted} {self.num_kept}"
        return " ".join([numbers, *(f"{each.num_shards}:{each.last_version}" for each in self.former)])

    @classmethod
    def parse(cls, text: str) -> "ShardPlan":
        """Parse the text that `str` gives. Raises ValueError for other text."""
        if len(text) > _MOST_TEXT:
            raise ValueError("it is too long")
        version, num_shards, num_wanted, num_kept, *rest = text.split(" ")
        pairs = [each.partition(":")[::2] for each in rest]
        former = [FormerNumber(int(number), int(last)) for number, last in pairs]
        plan = cls(
            version=int(version),
            num_shards=int(num_shards),
            num_wanted=int(num_wanted),
            num_kept=int(num_kept),
            former=tuple(former),
        )
        numbers = [plan.num_shards, plan.num_wanted, plan.num_kept, *(each.num_shards for each in former)]
        if plan.version < 1 or not all(1 <= number <= MOST_SHARDS for number in numbers):
            raise ValueError(f"a number is not from 1 to {MOST_SHARDS}")
        if plan.num_kept < max(plan.num_shards, plan.num_wanted):
            raise ValueError("fewer shards are kept than take requests")
        return plan
