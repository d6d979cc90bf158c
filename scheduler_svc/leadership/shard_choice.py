"""Choices among the shards of a deployment: where a new worker serves, and which shard gives one to which. Pure.

Every leader decides by what all leaders have published lately, so two may see different numbers. The rules then still
end in an even spread: only the shard with most workers gives one away, one at a time, and only to a shard that has at
least two less.
"""

from collections.abc import Sequence

from quire.v1 import cluster_pb2 as pb

_EVEN = 2  # workers that one shard must have more than another to give one away


def shard_of_new_worker(shards: Sequence[pb.Shard]) -> int:
    """Number of the shard with the fewest workers among those that are led; the lowest such number. 0: none is led."""
    led = [shard for shard in shards if shard.leader]
    return min(led, key=lambda shard: (shard.num_workers, shard.number)).number if led else 0


def shard_in_need(shards: Sequence[pb.Shard], giver: int) -> int | None:
    """Number of the shard that shall get a worker of the shard `giver`; None: that one gives none away."""
    led = [shard for shard in shards if shard.leader]
    if not led:
        return None
    richest = max(led, key=lambda shard: (shard.num_workers, -shard.number))
    poorest = min(led, key=lambda shard: (shard.num_workers, shard.number))
    is_uneven = richest.num_workers - poorest.num_workers >= _EVEN
    return poorest.number if richest.number == giver and is_uneven else None


def shard_to_stand_by(num_standbys: Sequence[int | None], in_need: Sequence[bool], turn: int) -> int:
    """Number of the shard that a scheduler stands by for: one with the fewest standbys, in need of a leader if any is.

    Args:
        num_standbys: of each shard; None: not known.
        in_need: whether nobody leads the shard, or its leader is about to leave.
        turn: number of this scheduler, so that several that begin together choose different ones.
    """
    ranks = [
        (not needs, number if number is not None else 0) for needs, number in zip(in_need, num_standbys, strict=True)
    ]
    best = [shard for shard, rank in enumerate(ranks) if rank == min(ranks)]
    return best[turn % len(best)]
