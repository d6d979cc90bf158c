"""Moves what a process has in memory into huge pages, once it has been loaded.

The interpreter and torch leave some 150 MB in pages of 4 KiB. When a process is killed the kernel frees them one by one
before it closes a single connection, so that its loss is seen later by as much; in huge pages that takes half as long,
and what runs meanwhile has fewer address translations to look up. It knows mappings, not what is in them. Linux alone,
from 6.1 on; elsewhere nothing happens.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

_MADV_COLLAPSE = 25
_HUGE_PAGE_BYTES = 2 << 20
# Larger ones are pools and weights, which are in huge pages from the start.
_MAX_BYTES = 256 << 20
_MAPS = Path("/proc/self/maps")


def collapse_memory() -> None:
    """Every private mapping of ordinary size, one after another; what cannot be moved stays as it is.

    The process goes on meanwhile, but for a thread that needs new memory, which waits for the page that is being moved.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin, end in _mappings():
        madvise(begin, end - begin, _MADV_COLLAPSE)


def _mappings() -> Iterator[tuple[int, int]]:
    """Those that are private, writable and no file's, from one huge page's limit to another."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        addresses, permissions, _, _, _, *name = line.split(maxsplit=5)
        if permissions != "rw-p" or (name and name[0] != "[heap]"):
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        begin, end = -(-begin // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, end // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if 0 < end - begin <= _MAX_BYTES:
            yield begin, end
