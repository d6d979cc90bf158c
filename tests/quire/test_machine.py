"""Processors and memory as the system says, a container's limits among it."""

import os
from pathlib import Path

import pytest

from quire import machine

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB, of which 6 are available."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {8 * MIB} kB\nMemFree: 5 kB\nMemAvailable: {6 * MIB} kB\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limit_memory(root: Path, folder: str, limit: str, used: int = 0, droppable: int = 0) -> None:
    write(root, f"sys/fs/cgroup{folder}/memory.max", f"{limit}\n")
    write(root, f"sys/fs/cgroup{folder}/memory.current", f"{used}\n")
    write(root, f"sys/fs/cgroup{folder}/memory.stat", f"anon 10\ninactive_file {droppable}\n")


def test_without_a_container_it_is_what_the_machine_has_available(root: Path) -> None:
    assert machine.free_memory_bytes(root) == 6 << 30
    assert not machine.has_memory_limit(root)
    assert machine.num_processors(root) == len(os.sched_getaffinity(0))


def test_a_containers_limit_less_its_use_bounds_what_is_free_and_dropped_files_count_as_free(root: Path) -> None:
    limit_memory(root, "", str(1 << 30), used=400 * MIB, droppable=150 * MIB)
    assert machine.free_memory_bytes(root) == (1024 - 400 + 150) * MIB
    assert machine.has_memory_limit(root)


def test_a_containers_limit_is_all_the_memory_that_it_has(root: Path) -> None:
    assert machine.total_memory_bytes(root) == 8 << 30
    limit_memory(root, "", str(1 << 30), used=900 * MIB)
    assert machine.total_memory_bytes(root) == 1 << 30


def test_swap_space_is_part_of_all_the_memory(root: Path) -> None:
    """Regression: weights that a machine holds with its swap space were refused."""
    write(root, "proc/meminfo", f"MemTotal: {8 * MIB} kB\nMemAvailable: {6 * MIB} kB\nSwapTotal: {2 * MIB} kB\n")
    assert machine.total_memory_bytes(root) == 10 << 30
    limit_memory(root, "", str(1 << 30))
    assert machine.total_memory_bytes(root) == 3 << 30


def test_swap_space_counts_as_far_as_a_container_may_use_it(root: Path) -> None:
    """Regression: weights of more than a pod's memory passed where its node has swap space, and the pod was killed."""
    write(root, "proc/meminfo", f"MemTotal: {8 * MIB} kB\nMemAvailable: {6 * MIB} kB\nSwapTotal: {4 * MIB} kB\n")
    limit_memory(root, "", str(1 << 30))
    write(root, "sys/fs/cgroup/memory.swap.max", "max\n")
    assert machine.total_memory_bytes(root) == 5 << 30
    write(root, "sys/fs/cgroup/memory.swap.max", f"{1 << 30}\n")
    assert machine.total_memory_bytes(root) == 2 << 30
    write(root, "sys/fs/cgroup/memory.swap.max", "0\n")
    assert machine.total_memory_bytes(root) == 1 << 30


def test_version_1_of_control_groups_limits_memory_and_swap_space_together(root: Path) -> None:
    write(root, "proc/meminfo", f"MemTotal: {8 * MIB} kB\nMemAvailable: {6 * MIB} kB\nSwapTotal: {4 * MIB} kB\n")
    write(root, "proc/self/cgroup", "4:memory:/docker/abc\n0::/\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n")
    for memory, both, total in (
        (1 << 63, 1 << 63, 12),
        (1 << 30, 1 << 63, 5),
        (1 << 30, 3 << 30, 3),
        (1 << 30, 1 << 30, 1),
    ):
        write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{memory}\n")
        write(root, "sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", f"{both}\n")
        assert machine.total_memory_bytes(root) == total << 30


def test_weights_that_were_loaded_before_count_as_free_and_mapped_libraries_do_not(root: Path) -> None:
    """Regression: in a container a worker that was started again had a smaller pool, by the size of its weights."""
    limit_memory(root, "", str(1 << 30), used=900 * MIB)
    files = {"inactive_file": 50 * MIB, "active_file": 500 * MIB, "file_mapped": 120 * MIB}
    write(root, "sys/fs/cgroup/memory.stat", "".join(f"{name} {number}\n" for name, number in files.items()))
    assert machine.free_memory_bytes(root) == (1024 - 900 + 50 + 500 - 120) * MIB


def test_limits_of_groups_above_ones_own_count_as_well(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/pods/worker\n")
    limit_memory(root, "/pods/worker", "max")
    limit_memory(root, "/pods", str(2 << 30), used=1 << 30)
    assert machine.free_memory_bytes(root) == 1 << 30


def test_a_limit_beyond_which_processes_are_slowed_down_counts_as_one_that_ends_them(root: Path) -> None:
    limit_memory(root, "", "max", used=1 << 30)
    write(root, "sys/fs/cgroup/memory.high", f"{3 << 30}\n")
    assert machine.free_memory_bytes(root) == 2 << 30
    assert machine.has_memory_limit(root)
    write(root, "sys/fs/cgroup/memory.high", "max\n")
    assert machine.free_memory_bytes(root) == 6 << 30
    assert not machine.has_memory_limit(root)


def test_version_1_of_control_groups_is_read_too_and_its_no_limit_is_none(root: Path) -> None:
    write(root, "proc/self/cgroup", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.free_memory_bytes(root) == 6 << 30
    assert not machine.has_memory_limit(root)
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{3 << 30}\n")
    assert machine.free_memory_bytes(root) == 3 << 30
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "100000\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert machine.num_processors(root) == 1


@pytest.mark.parametrize(("quota", "processors"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", None)])
def test_a_quota_bounds_the_processors_and_its_fraction_is_left_out(
    root: Path, quota: str, processors: int | None
) -> None:
    write(root, "sys/fs/cgroup/cpu.max", f"{quota}\n")
    assert machine.num_processors(root) == (processors or len(os.sched_getaffinity(0)))


def test_where_the_system_says_nothing_the_machine_is_taken_as_it_is(tmp_path: Path) -> None:
    assert machine.free_memory_bytes(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.own_memory_bytes(tmp_path) == 0
    assert machine.own_memory_bytes() > 0
