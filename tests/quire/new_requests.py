"""The shard of a new request, from the shards as they are described: both steps that `ShardRouter` takes."""

from collections.abc import Mapping, Sequence

from quire.shards import Shard, loads_of, shard_by_load


def shard_of_new_request(
    shards: Sequence[Shard],
    sent: Sequence[float],
    known_bytes: Mapping[int, int] | None = None,
    session: int | None = None,
) -> int:
    """Number of the shard that takes it; arguments as those of `loads_of` and `shard_by_load`."""
    return shard_by_load(loads_of(shards, sent), sent, known_bytes, session)
