"""Share of the store that is about shards: their number, their leases, and what their leaders publish."""

from collections.abc import Sequence
from typing import NamedTuple

from scheduler_svc.journal.keys import deployment_of
from scheduler_svc.journal.leases import ShardLeases, ShardReader, ShardReading
from scheduler_svc.journal.open_store import open_shard_leases, open_shard_reader
from scheduler_svc.journal.redis_plan import RedisShardPlan
from scheduler_svc.journal.shard_plan import ShardPlan
from scheduler_svc.journal.store import StoreConfigurationError, StoreUnavailableError


class PlannedShards(NamedTuple):
    """Shards by number, and their plan; None: the store has none. Or why it could not be read."""

    plan: ShardPlan | StoreUnavailableError | None
    shards: Sequence[ShardReading | StoreUnavailableError]


class ShardStore:
    """One per process of a deployment whose store other processes reach; connections are made when they are used."""

    def __init__(self, url: str, *, deployment: str, lease_ms: int) -> None:
        """Take the address of a store that `open_store` has opened. Raises StoreConfigurationError for memory."""
        self._url = url
        self._deployment = deployment
        self._lease_ms = lease_ms
        self._leases: dict[int, ShardLeases] = {}
        self.leases(0)  # raises for memory
        self._plan = RedisShardPlan(url, deployment=deployment, timeout_s=lease_ms / 3000)
        self._reader: ShardReader | None = None
        self._num_read = 0  # shards that the reader reads

    def leases(self, shard: int) -> ShardLeases:
        """Lease and standbys of one shard, until `close_leases`."""
        if shard not in self._leases:
            name = deployment_of(self._deployment, shard)
            self._leases[shard] = open_shard_leases(self._url, deployment=name, lease_ms=self._lease_ms)
        return self._leases[shard]

    async def close_leases(self, shard: int) -> None:
        """Close the connection for the lease of a shard with which this process has to do no more."""
        leases = self._leases.pop(shard, None)
        if leases is not None:
            await leases.close()

    async def read_plan(self) -> ShardPlan | None:
        """Read the plan alone, as `RedisShardPlan.read` does."""
        return await self._plan.read()

    async def replace_plan(self, plan: ShardPlan, seen_version: int) -> ShardPlan | None:
        """Put a plan in the place of another, as `RedisShardPlan.replace_plan` does."""
        return await self._plan.replace_plan(plan, seen_version)

    async def read_shards(self, num_shards: int, longest_ms: int) -> PlannedShards:
        """Read so many shards and their plan, as `ShardReader.read_shards` does."""
        text, shards = await (await self._reader_of(num_shards)).read_shards(longest_ms)
        if isinstance(text, StoreUnavailableError):
            return PlannedShards(text, shards)
        try:
            return PlannedShards(self._plan.parse(text), shards)
        except StoreConfigurationError as error:
            return PlannedShards(error, shards)

    async def read_cached(self, shards: Sequence[int]) -> Sequence[bytes | None]:
        """Read what these shards have cached, of those that were read last, as `ShardReader.read_cached` does."""
        return await (await self._reader_of(self._num_read)).read_cached(shards)

    async def close(self) -> None:
        """Close every connection."""
        for each in (*self._leases.values(), self._plan, self._reader):
            if each is not None:
                await each.close()

    async def _reader_of(self, num_shards: int) -> ShardReader:
        if self._reader is None or num_shards != self._num_read:
            if self._reader is not None:
                await self._reader.close()
            names = [deployment_of(self._deployment, shard) for shard in range(num_shards)]
            self._reader = open_shard_reader(self._url, deployments=names, lease_ms=self._lease_ms)
            self._num_read = num_shards
        return self._reader
