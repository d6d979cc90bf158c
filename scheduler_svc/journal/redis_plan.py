"""Number of shards in Redis or Valkey, over a connection of its own with short time limits."""

from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.links import open_link
from scheduler_svc.journal.redis_leases import MAX_TIMEOUT_S
from scheduler_svc.journal.redis_link import pack
from scheduler_svc.journal.shard_plan import ShardPlan
from scheduler_svc.journal.store import StoreConfigurationError

# Replaces the plan if it is the one that the caller has seen. KEYS: shards. ARGV: the new plan, the version of the one
# in its place; 0: there is none. Returns the plan that stands now.
_REPLACE = b"""
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%d+') ~= ARGV[2] then return held end
if not held and ARGV[2] ~= '0' then return '' end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
"""


class RedisShardPlan:
    """The plan of one deployment. A change is one script, which takes no effect if another one came first."""

    def __init__(self, url: str, *, deployment: str, timeout_s: float = MAX_TIMEOUT_S) -> None:
        """Take the address. Raises StoreConfigurationError or ValueError if it or the deployment is malformed."""
        self._key = Keys.of(deployment).shards
        self._link = open_link(url, [self._key], timeout_s=min(timeout_s, MAX_TIMEOUT_S), repeatable=False)

    async def read(self) -> ShardPlan | None:
        """Plan in the store; None if it has none. Raises StoreUnavailableError."""
        return self.parse(await self._link.call(pack("GET", self._key)))

    async def replace_plan(self, plan: ShardPlan, seen_version: int) -> ShardPlan | None:
        """Put a plan in the place of the one of this version; 0: of none. Returns the one that stands then.

        Raises StoreUnavailableError; the plan may have been put there nevertheless.
        """
        return self.parse(await self._link.call(pack("EVAL", _REPLACE, 1, self._key, str(plan), seen_version)))

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()

    def parse(self, text: bytes | None) -> ShardPlan | None:
        """Plan that the store has as this text. Raises StoreConfigurationError for another text."""
        try:
            return ShardPlan.parse(text.decode()) if text else None
        except ValueError as error:
            raise StoreConfigurationError(
                f"the number of shards at the key {self._key} cannot be read ({error}); delete the key while no "
                "scheduler runs: the schedulers then begin with --shards again"
            ) from None
