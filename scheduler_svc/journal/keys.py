"""Keys in Redis, every one of them.

The deployment stands in braces, a hash tag, so that all keys of one deployment live in one slot of a cluster. All
keys are written and read by the scheduler alone.

Of a deployment with several shards, shard 0 has these keys, and shard k has them with <deployment>/k in the braces:
each shard in one slot, and the shards in several.

    {quire:<deployment>}:epoch     string, an integer. The last leader epoch taken; INCR by a scheduler that starts
                                   to lead, raised by one whose store has lost it. Lives for ever.
    {quire:<deployment>}:lease     string: `<epoch> <leader_id> <address>` of the scheduler that leads; epoch 0 while it
                                   is about to. Renewed by it every quarter of its life, which is `lease_ms`; read
                                   by standbys, which may take it when it is gone. It decides who tries to lead;
                                   what fences a leader is the journal's ids.
    {quire:<deployment>}:standbys  sorted set: addresses of standbys, each with the server's time in milliseconds until
                                   which it counts as present. Written by standbys, read by a leader that is told to
                                   end.
    {quire:<deployment>}:shards    string, a `ShardPlan`: `<version> <num_shards> <num_wanted> <num_kept>` and former
                                   numbers. Of shard 0 alone. Written by the first scheduler, and by any that is
                                   asked for another number; read by all, a few times a second. Lives for ever.
    {quire:<deployment>}:load      string, a serialised quire.v1.Shard: what the leader says of its shard. Written by it
                                   a few times a second where there are several shards, read by all schedulers; gone
                                   soon after it is written no more.
    {quire:<deployment>}:cached    string, a serialised quire.v1.CachedBeginnings: which prompts the shard has cached,
                                   in some 8 KiB at most. Written with the load; read by all schedulers when the version
                                   in the load is another one.
    {quire:<deployment>}:journal   stream with ids `epoch-seq`; fields: e, a serialised quire.v1.JournalEntry, and
                                   c, its CRC-32 as eight hexadecimal digits. Appended by the leader's journal
                                   writer, read by a scheduler that begins to lead, and by standbys as it grows.
                                   Trimmed up to the oldest admission, restatement or pin that is still needed.
    {quire:<deployment>}:record:<request_id>
                                   string, a serialised quire.v1.RequestRecord. Written once when the request has
                                   ended; only its deletion replaces it, and the repair of a damaged one. Read by
                                   GetRequest and by late attachment. Expires (one hour later unless
                                   configured), or is dropped when records take more than they may.
    {quire:<deployment>}:record_bytes
                                   string, an integer. What all records count for together. This key and those below
                                   are written by the script that writes records, and read by it.
    {quire:<deployment>}:record_bytes_of
                                   sorted set: tenants that have records, each with what its records count for.
    {quire:<deployment>}:record_ends
                                   sorted set: the same tenants, each with the end, in Unix microseconds, of its record
                                   that ended first.
    {quire:<deployment>}:records_of:<tenant>
                                   sorted set: `<bytes>:<request_id>` of each record of the tenant, with its end.
    {quire:<deployment>}:records_dropped
                                   sorted set: tenants whose records were dropped for want of room, each with the latest
                                   end of such a record. Read by a scheduler that begins to lead, and by standbys: what
                                   ended before needs no record. Each is forgotten when that record would have expired.
"""

import re
from dataclasses import dataclass

_DEPLOYMENT = re.compile(r"[A-Za-z0-9._-]{1,64}(/[1-9][0-9]{0,2})?")


def deployment_of(deployment: str, shard: int) -> str:
    """Name under which the keys of one shard of a deployment stand."""
    return f"{deployment}/{shard}" if shard else deployment


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one shard of a deployment."""

    epoch: str
    lease: str
    standbys: str
    shards: str
    load: str
    cached: str
    journal: str
    record_prefix: str
    record_bytes: str
    record_bytes_of: str
    record_ends: str
    records_of_prefix: str
    records_dropped: str

    @classmethod
    def of(cls, deployment: str) -> "Keys":
        """Keys of a deployment, or of a shard by `deployment_of`.

        Raises ValueError if the name could be misread as part of a key.
        """
        if not _DEPLOYMENT.fullmatch(deployment):
            raise ValueError(f"deployment {deployment!r}: use 1 to 64 letters, digits, dots, underscores and hyphens")
        tag = f"{{quire:{deployment}}}"
        return cls(
            epoch=f"{tag}:epoch",
            lease=f"{tag}:lease",
            standbys=f"{tag}:standbys",
            shards=f"{tag}:shards",
            load=f"{tag}:load",
            cached=f"{tag}:cached",
            journal=f"{tag}:journal",
            record_prefix=f"{tag}:record:",
            record_bytes=f"{tag}:record_bytes",
            record_bytes_of=f"{tag}:record_bytes_of",
            record_ends=f"{tag}:record_ends",
            records_of_prefix=f"{tag}:records_of:",
            records_dropped=f"{tag}:records_dropped",
        )

    def record(self, request_id: str) -> str:
        """Key of a request's record."""
        return self.record_prefix + request_id
