"""Choice of the store by its URL."""

from collections.abc import Sequence

from quire.redaction import without_passwords
from quire.store_url import CLUSTER_SCHEMES, is_cluster
from scheduler_svc.journal.leases import Leases, ShardLeases, ShardReader
from scheduler_svc.journal.memory_leases import MemoryLeases
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.journal.redis_leases import MAX_TIMEOUT_S, RedisLeases, RedisShardReader
from scheduler_svc.journal.redis_store import RedisStore
from scheduler_svc.journal.redis_tail import RedisTail
from scheduler_svc.journal.store import Store, StoreConfigurationError, StoreError

MEMORY_URL = "memory"
_SCHEMES = ("redis://", "rediss://", "unix://", *(f"{scheme}://" for scheme in CLUSTER_SCHEMES))
_CLUSTER_REPLICAS = 1  # to wait for, unless it is said otherwise


async def open_store(
    url: str, *, deployment: str = "default", patience_s: float = 30.0, replicas: int | None = None
) -> Store:
    """Open a store and wait until it answers.

    Args:
        url: "memory", redis://[user:password@]host[:port][/db], rediss://… (TLS), unix:///path/to/socket, or of a
            cluster redis+cluster://[user:password@]host[:port][,host[:port]…], rediss+cluster://….
        deployment: keeps several systems apart in one server.
        patience_s: longest wait for a server that does not answer.
        replicas: that must have an entry before it counts as written, if there are so many. None: one in a cluster,
            else none.

    Raises:
        StoreConfigurationError: the URL or the credentials are wrong.
        StoreUnavailableError: no answer in time; the message says what to do.
    """
    if url == MEMORY_URL:
        return MemoryStore()
    if not url.startswith(_SCHEMES):
        raise StoreConfigurationError(
            f"store {without_passwords(url)!r}: give redis://host:port, rediss://host:port, unix:///path/to/socket, "
            "redis+cluster://host:port,host:port or memory"
        )
    if replicas is None:
        replicas = _CLUSTER_REPLICAS if is_cluster(url) else 0
    try:
        store = RedisStore(url, deployment=deployment, replicas=replicas)
    except ValueError as error:
        raise StoreConfigurationError(f"store {without_passwords(url)!r} cannot be used: {error}") from None
    try:
        await store.connect(patience_s)
    except StoreError:
        await store.close()
        raise
    return store


def open_leases(url: str, *, deployment: str, lease_ms: int) -> Leases:
    """Leases of a store that `open_store` has opened; connects when used."""
    if url == MEMORY_URL:
        return MemoryLeases()
    return RedisLeases(url, deployment=deployment, timeout_s=_timeout_s(lease_ms))


def open_shard_leases(url: str, *, deployment: str, lease_ms: int) -> ShardLeases:
    """Leases of a shard, by its deployment in a store that `open_store` has opened.

    Raises StoreConfigurationError for a store inside the process.
    """
    if url == MEMORY_URL:
        raise StoreConfigurationError("several shards share a store; give --store redis://host:port")
    return RedisLeases(url, deployment=deployment, timeout_s=_timeout_s(lease_ms))


def open_shard_reader(url: str, *, deployments: Sequence[str], lease_ms: int) -> ShardReader:
    """Reader of several shards, as one; `deployments`: as `open_shard_leases` takes each."""
    return RedisShardReader(url, deployments=deployments, timeout_s=_timeout_s(lease_ms))


def open_tail(url: str, *, deployment: str) -> RedisTail:
    """Tail of a journal that another process writes. Raises StoreConfigurationError for a store inside the process."""
    if url == MEMORY_URL:
        raise StoreConfigurationError(
            "a standby shares its store with the leader, and so do several shards; give --store redis://host:port"
        )
    return RedisTail(url, deployment=deployment)


def _timeout_s(lease_ms: int) -> float:
    """Time limit of a command about leases of this life."""
    return min(lease_ms / 3000, MAX_TIMEOUT_S)
