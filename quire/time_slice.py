"""Time slices that the kernel of Linux gives to threads: short for those that mostly wait and must run soon once woken.

A worker on a CPU computes with a thread on each processor. A scheduler, a store or a connection's thread that wakes up
meanwhile waits for the end of such a thread's slice, 1 to 4 ms, for each message; with a shorter slice of its own it
runs at once (EEVDF, Linux 6.12 and later). It takes no larger share of the processors by that, and needs no privilege.
Elsewhere nothing changes. Knows no processes of ours.
"""

import ctypes
import platform
import sys

_SHORT_NS = 100_000  # the shortest that the kernel takes
_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # of the system calls sched_setattr and sched_getattr


class _Attributes(ctypes.Structure):
    """Linux's struct sched_attr, as of its first version with utilisation clamps."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
        ("util_min", ctypes.c_uint32),
        ("util_max", ctypes.c_uint32),
    )


def shorten_slice(thread_id: int = 0) -> None:
    """Give a thread (0: the calling one), and what it starts from now on, the shortest slice; else a no-op."""
    _set_slice(thread_id, _SHORT_NS)


def restore_slice() -> None:
    """Give the calling thread, and what it starts from now on, the usual slice again."""
    _set_slice(0, 0)


def slice_ns(thread_id: int = 0) -> int | None:
    """Slice of a thread (0: the calling one) in nanoseconds, 0 on a Linux before 6.12. None where it cannot be read."""
    read = _read(thread_id)
    return None if read is None else int(read.runtime_ns)


def _set_slice(thread_id: int, slice_ns: int) -> None:
    attributes = _read(thread_id)
    if attributes is None or attributes.policy != 0:
        return  # a thread of another policy, such as real time, was given that on purpose
    attributes.runtime_ns = slice_ns
    set_number, _ = _NUMBERS[platform.machine()]
    ctypes.CDLL(None).syscall(set_number, thread_id, ctypes.byref(attributes), 0)


def _read(thread_id: int) -> _Attributes | None:
    if sys.platform != "linux" or platform.machine() not in _NUMBERS:
        return None
    _, get_number = _NUMBERS[platform.machine()]
    attributes = _Attributes()
    failed = ctypes.CDLL(None).syscall(get_number, thread_id, ctypes.byref(attributes), ctypes.sizeof(attributes), 0)
    return None if failed else attributes
