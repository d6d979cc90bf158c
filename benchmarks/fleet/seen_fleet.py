"""Shards of a fleet as processes see them, which is later than they are."""

from quire.shards import Shard
from quire.v1 import cluster_pb2 as pb


class SeenFleet:
    """Shards as some processes see them: what leaders had published when the store was looked at last."""

    def __init__(self, latest: list[pb.Shard]) -> None:
        self._latest = latest
        self.shards = list(latest)
        self.num_wanted = len(latest)
        self.unseen: tuple[int, ...] = ()

    def look(self) -> None:
        """Look at the store."""
        self.shards = list(self._latest)

    def leader_of(self, shard: int) -> str | None:
        """Address of a shard's leader; None: none is known."""
        return self.shards[shard].leader or None

    def for_clients(self) -> list[Shard]:
        """Shards as the SDK describes them."""
        return [
            Shard(
                number=each.number,
                leader=each.leader,
                epoch=each.epoch,
                num_workers=each.num_workers,
                num_running=each.num_running,
                num_waiting=each.num_waiting,
            )
            for each in self.shards
        ]
