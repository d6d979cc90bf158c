"""Memory that has settled goes into huge pages, with everything that is in it."""

import ctypes
import platform
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path

import torch

from kernels.native.host_memory import zeros_as_used
from worker_svc.huge_pages import collapse_memory

NUM_BYTES = 16 << 20
HUGE_PAGE_BYTES = 2 << 20


def bytes_within(begin: int, end: int, kind: str) -> int:
    """Bytes of one kind, as the kernel names it, of the mappings that lie in this range or around it."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, last = (int(address, 16) for address in name.split("-"))
            counts = first < end and last > begin
        elif counts and name == f"{kind}:":
            total += int(rest.split()[0]) * 1024
    return total


def test_what_is_in_small_pages_moves_and_stays_what_it_is() -> None:
    memory = mmap(-1, NUM_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    pattern = bytes(range(256)) * (NUM_BYTES // 256)
    memory[:] = pattern
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    before = bytes_within(begin, begin + NUM_BYTES, "AnonHugePages")
    collapse_memory()
    assert memory[:] == pattern
    moved = bytes_within(begin, begin + NUM_BYTES, "AnonHugePages") - before
    if can_collapse():
        assert moved >= NUM_BYTES - 2 * HUGE_PAGE_BYTES


def can_collapse() -> bool:
    """Whether this kernel knows how."""
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    return (major, minor) >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_a_pool_that_is_not_used_yet_takes_no_memory() -> None:
    pool = zeros_as_used((64 << 20,), torch.uint8)
    begin, end = pool.data_ptr(), pool.data_ptr() + pool.nbytes
    before = bytes_within(begin, end, "Rss")
    collapse_memory()
    assert bytes_within(begin, end, "Rss") == before
