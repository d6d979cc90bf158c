"""Processors and free memory that this machine or container gives a process.

Reads /proc and /sys of Linux: a limit of a container (cgroup, version 1 or 2) counts as the machine's own.
Without these files there are no limits.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_KIB = 1024
# In memory.stat of either version: file cache that was used once, such that was used again, and such that is mapped.
_FILE_STATS = ("inactive_file", "active_file", "file_mapped")
_FILE_STATS_1 = ("total_inactive_file", "total_active_file", "total_mapped_file")


def num_processors(root: Path = _ROOT) -> int:
    """Number of threads that can compute at once: processors of this process, within the container's quota.

    A quota's fraction is rounded down: threads that exhaust a quota all stand still until its next period.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [*_quotas(root)]
    return max(1, min(usable, *(int(each) for each in quotas))) if quotas else usable


def free_memory_bytes(root: Path = _ROOT) -> int:
    """Memory that can be allocated now, within the container's limits; droppable file cache counts as free."""
    total = _total_bytes(root)
    left = (max(0, limit - used) for limit, used in _memory_limits(root))
    return min(_bytes_said(root / "proc/meminfo", "MemAvailable") or total, *left, total)


def total_memory_bytes(root: Path = _ROOT) -> int:
    """Memory of this machine, free or not, or of this container if it has a limit, with swap space that it may use."""
    memory = min([_total_bytes(root), *(limit for limit, _ in _memory_limits(root))])
    swap = min([_bytes_said(root / "proc/meminfo", "SwapTotal") or 0, *_numbers(root, "", "memory.swap.max")])
    return min([memory + swap, *_numbers(root, "memory", "memory.memsw.limit_in_bytes")])  # version 1 limits the sum


def has_memory_limit(root: Path = _ROOT) -> bool:
    """True if a container's limit bounds the memory, so that no other process can take what it leaves."""
    return any(limit < _total_bytes(root) for limit, _ in _memory_limits(root))


def own_memory_bytes(root: Path = _ROOT) -> int:
    """Resident memory of this process, without mapped files."""
    return _bytes_said(root / "proc/self/status", "RssAnon") or 0


def _total_bytes(root: Path) -> int:
    return _bytes_said(root / "proc/meminfo", "MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _bytes_said(path: Path, name: str) -> int | None:
    """Bytes that a line `name: N kB` of a file says; None without such a line."""
    for line in _lines(path):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * _KIB
    return None


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit, and use without droppable file cache, of each cgroup of this process that has a limit.

    Beyond `memory.high`, systemd's MemoryHigh=, the kernel lets a process stand still where `memory.max` ends it.
    """
    for folder in _folders(root, ""):
        for limit in ("memory.max", "memory.high"):
            yield from _memory_limit(folder, limit, "memory.current", _FILE_STATS)
    for folder in _folders(root, "memory"):
        yield from _memory_limit(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", _FILE_STATS_1)


def _memory_limit(
    folder: Path, limit_file: str, use_file: str, file_stats: tuple[str, str, str]
) -> Iterator[tuple[int, int]]:
    limit, used = _number(folder / limit_file), _number(folder / use_file)
    if limit is None or used is None:
        return
    stat = dict(line.split()[:2] for line in _lines(folder / "memory.stat"))
    inactive, active, mapped = (int(stat.get(name, 0)) for name in file_stats)
    # Weights that were loaded twice are active, but mapped no more. What is mapped, as libraries are, is needed again.
    yield limit, max(0, used - inactive - max(0, active - mapped))


def _quotas(root: Path) -> Iterator[float]:
    """Processors that each cgroup with a quota may use."""
    for folder in _folders(root, ""):
        quota, period = [*"".join(_lines(folder / "cpu.max")).split(), "", ""][:2]
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)
    for folder in _folders(root, "cpu"):
        limit, each = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if limit is not None and each:
            yield limit / each


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and its parents, where they are visible; `controller` "": version 2."""
    mounted = root / "sys/fs/cgroup" / controller
    for line in _lines(root / "proc/self/cgroup") or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = Path(path.strip().strip("/"))
            for each in (own, *own.parents):
                yield mounted / each
            return
    yield mounted


def _numbers(root: Path, controller: str, file: str) -> Iterator[int]:
    """Limits in a file of each cgroup of this process that has one."""
    for folder in _folders(root, controller):
        if (limit := _number(folder / file)) is not None:
            yield limit


def _number(path: Path) -> int | None:
    """Limit in a file; None for no such file, or no limit."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
