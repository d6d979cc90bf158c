"""Memory that has settled goes into huge pages, with everything that is in it."""

import ctypes
import platform
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.native.host_memory import take_memory, zeros_as_used
from worker_svc.memory.huge_pages import collapse_memory
from worker_svc.memory.kv_pool import BlockShape, KVPool
from worker_svc.start.runner_start import take_memory_in_background

NUM_BYTES = 16 << 20
HUGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25


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
    assert moved >= NUM_BYTES - 2 * HUGE_PAGE_BYTES or not can_collapse()


def can_collapse() -> bool:
    """True if this kernel supports it, and has so many huge pages that are free or can be made so now."""
    with mmap(-1, NUM_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS) as memory:
        memory[:] = bytes([1]) * NUM_BYTES
        try:
            memory.madvise(MADV_COLLAPSE)
        except OSError:
            return False
    return True


def kernel_version() -> tuple[int, ...]:
    return tuple(int(part) for part in platform.release().split(".")[:2])


def test_a_pool_that_is_not_used_yet_takes_no_memory() -> None:
    pool = zeros_as_used((64 << 20,), torch.uint8)
    begin, end = pool.data_ptr(), pool.data_ptr() + pool.nbytes
    before = bytes_within(begin, end, "Rss")
    collapse_memory()
    assert bytes_within(begin, end, "Rss") == before


def test_memory_is_taken_from_a_tensors_beginning_and_what_is_in_it_stays() -> None:
    pool = zeros_as_used((64 << 20,), torch.uint8)
    begin, end = pool.data_ptr(), pool.data_ptr() + pool.nbytes
    before = bytes_within(begin, end, "Rss")
    pool[5] = 7
    take_memory(pool, NUM_BYTES)
    taken = bytes_within(begin, end, "Rss") - before
    if kernel_version() >= (5, 14):
        assert NUM_BYTES <= taken <= NUM_BYTES + 2 * HUGE_PAGE_BYTES
    assert pool[5] == 7
    assert pool.sum() == 7


def test_all_memory_of_a_small_tensor_is_taken() -> None:
    pool = zeros_as_used((3, 1 << 20), torch.uint8)
    begin, end = pool.data_ptr(), pool.data_ptr() + pool.nbytes
    before = bytes_within(begin, end, "Rss")
    take_memory(pool, 1 << 30)
    if kernel_version() >= (5, 14):
        assert bytes_within(begin, end, "Rss") - before >= pool.nbytes


@pytest.mark.parametrize("whole", [True, False])
def test_a_worker_that_only_decodes_has_its_whole_pool_at_hand(whole: bool) -> None:
    shape = BlockShape(num_layers=4, num_kv_heads=8, head_dim=64, block_size=16, dtype=torch.float32)
    pool = KVPool(shape, 256, torch.device("cpu"), num_fetched_blocks=128)
    before = [resident_bytes(each) for each in (pool.blocks, pool.fetched_blocks)]
    model: Any = SimpleNamespace(take_memory=lambda: None)
    take_memory_in_background(model, pool, whole=whole).join()
    taken = [resident_bytes(each) - rss for each, rss in zip((pool.blocks, pool.fetched_blocks), before, strict=True)]
    if kernel_version() >= (5, 14):
        assert (taken[0] >= pool.blocks.nbytes) == whole
        assert (taken[1] >= pool.fetched_blocks.nbytes) == whole


def resident_bytes(tensor: Tensor) -> int:
    return bytes_within(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, "Rss")
