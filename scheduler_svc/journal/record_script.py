"""The script that writes records and keeps them within their limits, by the accounts that it keeps beside them.

Runs in Redis or Valkey, so that accounts and records change together whoever leads. Knows nothing of what is in a
record.
"""

from collections.abc import Sequence

from scheduler_svc.journal.keys import Keys
from scheduler_svc.journal.redis_link import Packed, pack
from scheduler_svc.journal.store import RECORD_OVERHEAD, Record, RecordLimits

# The store does no other command while a script runs.
RECORDS_AT_ONCE = 16
MOST_DROPPED = 256  # records by one script; where it has dropped so many, there may be more to drop

# KEYS: record_bytes, record_bytes_of, record_ends, records_dropped. ARGV: the prefixes of records_of and of records;
# now and the time to live, in microseconds; the bytes that all and that one tenant may have; then of each record its
# request_id, tenant, end in Unix microseconds, payload, and 1 if it replaces another, else 0. Returns how many records
# were dropped for want of room: with MOST_DROPPED, repeat it, which drops the rest where a limit was lowered by far.
# A record that is there stays, unless one that replaces it comes: a write may come late, from a leader that was frozen
# or over a stalled path, and must not undo a deletion that was acknowledged since.
# Records take no more than what leaves a quarter of the server's memory free, where that is limited, whatever else it
# keeps: full, it would take no entry of the journal, and nothing would go on before records expire.
# A record lives from when it is written, by the server's clock: those of schedulers may be hours apart, and then its
# account only ends earlier or later than it.
# The first line has the server refuse the whole script, not a part of it, when it is out of memory.
_PUT = b"""#!lua
local bytes, bytes_of, ends, dropped_of = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local ledger, record = ARGV[1], ARGV[2]
local now, ttl, most, tenant_most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local expired, num_dropped = now - ttl, 0

local function member(id, num_bytes)
  return string.format('%.0f:', num_bytes + 2 * #id + OVERHEAD) .. id
end

local function weight_of(name)
  return tonumber(string.match(name, '^%d+'))
end

local function count(tenant, change)
  local text = string.format('%.0f', change)
  redis.call('INCRBY', bytes, text)
  redis.call('ZINCRBY', bytes_of, text, tenant)
end

local function note_first(tenant)
  local first = redis.call('ZRANGE', ledger .. tenant, 0, 0, 'WITHSCORES')
  if first[2] then
    redis.call('ZADD', ends, first[2], tenant)
  else
    redis.call('ZREM', ends, tenant)
    redis.call('ZREM', bytes_of, tenant)
    if redis.call('ZCARD', bytes_of) == 0 then redis.call('DEL', bytes) end
  end
end

local function pop_first(tenant)
  local first = redis.call('ZPOPMIN', ledger .. tenant)
  if first[1] then count(tenant, -weight_of(first[1])) end
  note_first(tenant)
  if not first[1] then return end  -- somebody else deleted the keys of the accounts
  return string.match(first[1], '^%d+:(.*)$'), first[2]
end

local function drop_first(tenant)
  local id, ended = pop_first(tenant)
  if not id then return end
  redis.call('DEL', record .. id)
  redis.call('ZADD', dropped_of, 'GT', ended, tenant)
  num_dropped = num_dropped + 1
end

local function may_drop()
  return num_dropped < MOST_DROPPED
end

local function number_of(tenant)
  return redis.call('ZCARD', ledger .. tenant)
end

local memory = redis.pcall('INFO', 'memory')
if type(memory) ~= 'string' then memory = '' end  -- it is not told here
local room = tonumber(string.match(memory, '\\nmaxmemory:(%d+)') or 0)
local excess = tonumber(string.match(memory, '\\nused_memory:(%d+)') or 0) - room * 0.75
if room > 0 and excess > 0 then most = math.min(most, tonumber(redis.call('GET', bytes) or 0) - excess) end

redis.call('ZREMRANGEBYSCORE', dropped_of, '-inf', string.format('%.0f', expired))
for i = 7, #ARGV, 5 do
  local id, tenant, ended, payload, replaces = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  for _ = 1, 64 do
    local oldest = redis.call('ZRANGE', ends, 0, 0, 'WITHSCORES')
    if not oldest[1] or tonumber(oldest[2]) > expired then break end
    pop_first(oldest[1])
  end
  if replaces == '1' or redis.call('EXISTS', record .. id) == 0 then
    local known = member(id, redis.call('STRLEN', record .. id))
    if redis.call('ZREM', ledger .. tenant, known) == 1 then count(tenant, -weight_of(known)) end
    redis.call('SET', record .. id, payload, 'PX', string.format('%.0f', ttl / 1000))
    local name = member(id, #payload)
    if redis.call('ZADD', ledger .. tenant, ended, name) == 1 then count(tenant, weight_of(name)) end
    note_first(tenant)
  end
  while may_drop() and tonumber(redis.call('ZSCORE', bytes_of, tenant) or 0) > tenant_most and number_of(tenant) > 1 do
    drop_first(tenant)
  end
  while may_drop() and tonumber(redis.call('GET', bytes) or 0) > most do
    local largest = redis.call('ZREVRANGE', bytes_of, 0, 0)[1]
    if not largest then redis.call('DEL', bytes) break end
    if number_of(largest) == 1 and redis.call('ZCARD', bytes_of) == 1 then break end
    drop_first(largest)
  end
end
return num_dropped
""".replace(b"OVERHEAD", b"%d" % RECORD_OVERHEAD).replace(b"MOST_DROPPED", b"%d" % MOST_DROPPED)


def putting(keys: Keys, records: Sequence[Record], limits: RecordLimits, now_unix_ns: int) -> Packed:
    """The command that writes these records, at most `RECORDS_AT_ONCE`."""
    words: list[bytes | str | int] = ["EVAL", _PUT, 4]
    words += [keys.record_bytes, keys.record_bytes_of, keys.record_ends, keys.records_dropped]
    words += [keys.records_of_prefix, keys.record_prefix]
    words += [now_unix_ns // 1000, limits.ttl_s * 1_000_000, limits.max_bytes, limits.max_tenant_bytes]
    for each in records:
        words += [each.request_id, each.tenant, each.ended_unix_ns // 1000, each.payload, int(each.replaces)]
    return pack(*words)
