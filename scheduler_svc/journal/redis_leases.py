"""Lease and standbys in Redis or Valkey, over a connection of their own with short time limits.

Never repeats a command: the caller knows when to ask again.
"""

from collections.abc import Sequence
from typing import Any

from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.leases import AllShardsReading, HeldLease, Lease, ShardReading
from scheduler_svc.journal.links import open_link
from scheduler_svc.journal.redis_link import pack
from scheduler_svc.journal.store import StoreConfigurationError, StoreUnavailableError

MAX_TIMEOUT_S = 0.5
_ENDLESS_MS = 1 << 40  # left of a lease without a time to live: a tool that copied the store has dropped that

# Each changes the lease in one step. KEYS: lease. ARGV: value, time to live in ms, an epoch, the holder.
_TAKE = b"""
local held = redis.call('GET', KEYS[1])
if held then
  local epoch, holder = string.match(held, '^(%d+) (.*)$')
  if holder ~= ARGV[4] and epoch ~= ARGV[3] then return held end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ''
"""
_HOLD = b"""
local held = redis.call('GET', KEYS[1])
if held then
  local epoch, holder = string.match(held, '^(%d+) (.*)$')
  if not epoch then return held end
  if holder ~= ARGV[4] and (epoch == '0' or tonumber(epoch) > tonumber(ARGV[3])) then return held end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ''
"""
# ARGV: value, time to live in ms.
_SHORTEN = b"""
local left_ms = redis.call('PTTL', KEYS[1])
if redis.call('GET', KEYS[1]) == ARGV[1] and (left_ms == -1 or left_ms > tonumber(ARGV[2])) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return ''
"""
_RELEASE = b"""
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%d+ (.*)$') == ARGV[4] then redis.call('DEL', KEYS[1]) end
return ''
"""
# KEYS: standbys. ARGV: address, time to live in ms. The server's clock is the only one that counts.
_ANNOUNCE = b"""
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
if ARGV[2] == '0' then redis.call('ZREM', KEYS[1], ARGV[1])
else redis.call('ZADD', KEYS[1], string.format('%.0f', now_ms + ARGV[2]), ARGV[1]) end
return ''
"""
# ARGV: the longest time to live in ms. Longer are those that were announced before the server's clock was set back.
_STANDBYS = b"""
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local latest_ms = string.format('%.0f', now_ms + ARGV[1])
return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now_ms), latest_ms)
"""


class RedisLeases:
    """Scripts go as EVAL, whole: they are short, rare, and then need not be known to a server that was replaced."""

    def __init__(self, url: str, *, deployment: str = "default", timeout_s: float = MAX_TIMEOUT_S) -> None:
        """Take the address. Raises StoreConfigurationError or ValueError if it or the deployment is malformed."""
        self._keys = Keys.of(deployment)
        self._link = open_link(url, [self._keys.lease], timeout_s=timeout_s, repeatable=False)

    async def read(self) -> HeldLease | None:
        value, left_ms = await self._link.call_many([pack("GET", self._keys.lease), pack("PTTL", self._keys.lease)])
        return _held(value, left_ms, self._keys.lease)

    async def take_lease(self, lease: Lease, ttl_ms: int, *, ended_epoch: int = 0) -> Lease | None:
        return await self._change(_TAKE, lease, ttl_ms, ended_epoch or -1)

    async def hold(self, lease: Lease, ttl_ms: int) -> Lease | None:
        return await self._change(_HOLD, lease, ttl_ms, lease.epoch)

    async def shorten(self, lease: Lease, ttl_ms: int) -> None:
        await self._link.call(pack("EVAL", _SHORTEN, 1, self._keys.lease, str(lease), ttl_ms))

    async def release(self, lease: Lease) -> None:
        await self._change(_RELEASE, lease, 0, lease.epoch)

    async def announce(self, address: str, ttl_ms: int) -> None:
        await self._link.call(pack("EVAL", _ANNOUNCE, 1, self._keys.standbys, address, ttl_ms))

    async def standbys(self, longest_ms: int) -> Sequence[str]:
        found = await self._link.call(pack("EVAL", _STANDBYS, 1, self._keys.standbys, longest_ms))
        return list(_addresses(found))

    async def publish_shard(self, load: bytes, cached: bytes, ttl_ms: int) -> None:
        keys = self._keys
        published = ((keys.cached, cached), (keys.load, load))
        await self._link.call_many([pack("SET", key, value, "PX", ttl_ms) for key, value in published])

    async def close(self) -> None:
        await self._link.close()

    async def _change(self, script: bytes, lease: Lease, ttl_ms: int, epoch: int) -> Lease | None:
        """Change the lease by a script. Returns the lease of its holder; None if it is ours."""
        command = pack("EVAL", script, 1, self._keys.lease, str(lease), ttl_ms, epoch, lease.holder)
        held: bytes = await self._link.call(command)
        return _parsed(held, self._keys.lease) if held else None


class RedisShardReader:
    """Reads all shards in one round trip over one connection: hundreds of them cost a server no more connections.

    In a cluster that is one of each for every node, at the same time; a node that fails concerns its own shards alone.
    """

    def __init__(self, url: str, *, deployments: Sequence[str], timeout_s: float = MAX_TIMEOUT_S) -> None:
        """Take the address, and the deployment of each shard. Raises as RedisLeases does."""
        self._keys = [Keys.of(deployment) for deployment in deployments]
        leases = [keys.lease for keys in self._keys]
        self._link = open_link(url, leases, timeout_s=timeout_s, repeatable=False)

    async def read_shards(self, longest_ms: int) -> AllShardsReading:
        batches = []
        for keys in self._keys:
            standbys = pack("EVAL", _STANDBYS, 1, keys.standbys, longest_ms)
            batches.append([pack("GET", keys.lease), pack("PTTL", keys.lease), pack("GET", keys.load), standbys])
        batches[0].append(pack("GET", self._keys[0].shards))
        answers = await self._link.call_each(batches)
        first = answers[0]
        plan = first if isinstance(first, StoreUnavailableError) else first.pop()
        shards = [
            each if isinstance(each, StoreUnavailableError) else _reading(each, keys.lease)
            for keys, each in zip(self._keys, answers, strict=True)
        ]
        return AllShardsReading(plan, shards)

    async def read_cached(self, shards: Sequence[int]) -> Sequence[bytes | None]:
        asked = set(shards)
        batches = [[pack("GET", keys.cached)] if shard in asked else [] for shard, keys in enumerate(self._keys)]
        answers = await self._link.call_each(batches)
        found = [answers[shard] for shard in shards]
        return [None if isinstance(each, StoreUnavailableError) else each[0] or b"" for each in found]

    async def close(self) -> None:
        await self._link.close()


def _reading(answer: Sequence[Any], key: str) -> ShardReading | StoreUnavailableError:
    value, left_ms, load, standbys = answer
    try:
        return ShardReading(_held(value, left_ms, key), load or b"", _addresses(standbys))
    except StoreUnavailableError as error:
        return error


def _addresses(found: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(address.decode() for address in found)


def _held(value: bytes | None, left_ms: int, key: str) -> HeldLease | None:
    if value is None or left_ms == -2:  # it went between the two
        return None
    return HeldLease(_parsed(value, key), _ENDLESS_MS if left_ms == -1 else left_ms)


def _parsed(value: bytes, key: str) -> Lease:
    try:
        return Lease.parse(value.decode())
    except ValueError:
        raise StoreConfigurationError(f"the key of the lease, {key}, holds something else; delete it") from None
