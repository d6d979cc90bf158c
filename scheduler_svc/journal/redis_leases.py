"""The lease and the standbys in Redis or Valkey, over a connection of their own with short time limits.

No command is repeated blindly: who asks knows better when to ask again.
"""

from collections.abc import Sequence

from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.leases import HeldLease, Lease
from scheduler_svc.journal.redis_link import RedisLink, pack

MAX_TIMEOUT_S = 0.5

# Each changes the lease in one step. KEYS: lease, epoch counter. ARGV: value, time to live in ms, an epoch.
_TAKE = b"""
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] and string.match(held, '^%d+') ~= ARGV[3] then return held end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ''
"""
_CLAIM = b"""
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
if last > tonumber(ARGV[3]) then return last end
if last < tonumber(ARGV[3]) then redis.call('SET', KEYS[2], ARGV[3]) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return tonumber(ARGV[3])
"""
_RENEW = b"""
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 'it is held by ' .. held end
if not held then
  local last = tonumber(redis.call('GET', KEYS[2]) or '0')
  if last > tonumber(ARGV[3]) then return 'epoch ' .. last .. ' was taken' end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ''
"""
_RELEASE = b"""
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
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
_STANDBYS = b"""
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now_ms), '+inf')
"""


class RedisLeases:
    """Scripts go as EVAL, whole: they are short, rare, and then need not be known to a server that was replaced."""

    def __init__(self, url: str, *, deployment: str = "default", timeout_s: float = MAX_TIMEOUT_S) -> None:
        """Takes the address. Raises StoreConfigurationError or ValueError if it or the deployment is malformed."""
        self._keys = Keys.of(deployment)
        self._link = RedisLink(url, timeout_s=min(timeout_s, MAX_TIMEOUT_S), repeatable=False)

    async def read(self) -> HeldLease | None:
        value, left_ms = await self._link.call_many([pack("GET", self._keys.lease), pack("PTTL", self._keys.lease)])
        if value is None or left_ms == -2:  # it went between the two
            return None
        return HeldLease(Lease.parse(value.decode()), left_ms)

    async def take(self, lease: Lease, ttl_ms: int, *, ended_epoch: int = 0) -> Lease | None:
        held: bytes = await self._change(_TAKE, lease, ttl_ms, ended_epoch or -1)
        return Lease.parse(held.decode()) if held else None

    async def claim(self, lease: Lease, ttl_ms: int) -> int:
        return int(await self._change(_CLAIM, lease, ttl_ms, lease.epoch))

    async def renew(self, lease: Lease, ttl_ms: int) -> str:
        reason: bytes = await self._change(_RENEW, lease, ttl_ms, lease.epoch)
        return reason.decode()

    async def release(self, lease: Lease) -> None:
        await self._link.call(pack("EVAL", _RELEASE, 1, self._keys.lease, str(lease)))

    async def announce(self, address: str, ttl_ms: int) -> None:
        await self._link.call(pack("EVAL", _ANNOUNCE, 1, self._keys.standbys, address, ttl_ms))

    async def standbys(self) -> Sequence[str]:
        found = await self._link.call(pack("EVAL", _STANDBYS, 1, self._keys.standbys))
        return [address.decode() for address in found]

    async def close(self) -> None:
        await self._link.close()

    async def _change(self, script: bytes, lease: Lease, ttl_ms: int, epoch: int) -> bytes:
        command = pack("EVAL", script, 2, self._keys.lease, self._keys.epoch, str(lease), ttl_ms, epoch)
        reply: bytes = await self._link.call(command)
        return reply
