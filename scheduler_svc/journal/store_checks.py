"""Checks of a store's nodes: whether each is recent enough, and what it may lose of what it has acknowledged."""

import structlog

from scheduler_svc.journal.links import StoreLink
from scheduler_svc.journal.redis_link import NEEDED, pack
from scheduler_svc.journal.store import StoreConfigurationError, StoreUnavailableError

log = structlog.get_logger()

UNKNOWN = "unknown: the store does not show its configuration"
_NONE = "none: accepted requests end with the store's process"
_BY_FSYNC = {
    "no": "fsync by the system's choice: half a minute may be lost with power, and some with the store's process",
    "everysec": "fsync everysec: the last two seconds may be lost with the store's process or with power",
    "always": "fsync always: it outlives every process and the loss of power",
}
_OLDEST = 7  # as Redis counts; Valkey says redis_version:7.2.4, beside its own
_FROM_WORST = (_NONE, _BY_FSYNC["no"], _BY_FSYNC["everysec"], UNKNOWN, _BY_FSYNC["always"])


async def check_nodes(link: StoreLink, address: str) -> str:
    """Warn of settings that would lose acknowledged entries, of each node that keeps the link's keys.

    Returns how durable an acknowledgement is where it is least, in a few words. `address` names the store. Raises
    StoreUnavailableError, or StoreConfigurationError if a node is too old.
    """
    infos = await link.call_nodes([pack("INFO", each) for each in ("server", "persistence", "memory")])
    modes = await link.call_nodes([pack("CONFIG", "GET", "appendfsync")])
    found = set()
    for node, info in infos.items():
        where = f"{address}, node {node}" if node else address
        if isinstance(info, StoreUnavailableError):
            log.warning("a node of the store does not answer", store=where, reason=info.message)
            continue
        server, persistence, memory = (_parse(text) for text in info)
        _check_version(node, server.get("redis_version", ""))
        _warn_of_loss(where, persistence, memory)
        mode = modes.get(node)
        fsync = mode[0].get(b"appendfsync", b"").decode() if isinstance(mode, list) else ""
        found.add(_NONE if persistence.get("aof_enabled") == "0" else _BY_FSYNC.get(fsync, UNKNOWN))
    return min(found, key=_FROM_WORST.index, default=UNKNOWN)


def _check_version(node: str, version: str) -> None:
    """Raises StoreConfigurationError for a version that has not all commands; one that is not told may be any."""
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < _OLDEST:
        raise StoreConfigurationError(f"{f'its node {node}' if node else 'it'} is of version {version}; {NEEDED}")


def _warn_of_loss(where: str, persistence: dict[str, str], memory: dict[str, str]) -> None:
    if persistence.get("aof_enabled") == "0":
        log.warning(
            "NOT DURABLE: the store keeps no append-only file, what was accepted dies with it; set appendonly yes",
            store=where,
        )
    if memory.get("maxmemory", "0") != "0" and memory.get("maxmemory_policy") != "noeviction":
        log.warning("the store may evict the journal: set maxmemory-policy noeviction", store=where)


def _parse(info: bytes) -> dict[str, str]:
    lines = info.decode().splitlines()
    return dict(line.partition(":")[::2] for line in lines if ":" in line)
