"""Groups of rows that share blocks: what is found is shared indeed, and saves as much as one level of sharing can."""

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention.cascade_groups import (
    IntArray,
    SharedPrefix,
    SharingCost,
    cascade_arrays,
    fill_cascade_arrays,
    find_shared_prefixes,
    max_groups,
    num_shareable_blocks,
    sharing_cost,
)
from kernels.attention.shape import AttentionShape

FREE = SharingCost(per_step=1, per_group=0, per_row=0)
CHEAP = SharingCost(per_step=20, per_group=3, per_row=2)


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for i, part in enumerate(rest):
            yield [*rest[:i], [rows[0], *part], *rest[i + 1 :]]


def common(tables: IntArray, shareable: IntArray, rows: list[int]) -> int:
    """Blocks that the rows have in common, looked at one by one."""
    count = 0
    while count < min(shareable[rows]) and len(set(tables[rows, count].tolist())) == 1:
        count += 1
    return count


def gain(parts: list[tuple[int, int]], cost: SharingCost, block_size: int) -> int:
    return sum(max(0, cost.gain(count, blocks * block_size)) for count, blocks in parts if count > 1)


def random_tables(generator: np.random.Generator, num_rows: int, width: int) -> tuple[IntArray, IntArray]:
    """Rows forked off each other at some block; the rest their own, or whatever lay there before."""
    tables = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
    for row in range(1, num_rows):
        if generator.random() < 0.8:
            depth = generator.integers(width + 1)
            tables[row, :depth] = tables[generator.integers(row), :depth]
    order = generator.permutation(num_rows)
    return tables[order], generator.integers(0, width + 1, num_rows).astype(np.int32)


@pytest.mark.parametrize("cost", [FREE, CHEAP], ids=["free", "cheap"])
def test_groups_save_about_as_much_as_the_best_partition_of_the_rows(cost: SharingCost) -> None:
    saved, possible = 0, 0
    for seed in range(400):
        tables, shareable = random_tables(np.random.default_rng(seed), 1 + seed % 6, 1 + seed % 5)
        found = find_shared_prefixes(tables, shareable, 4, cost)
        assert all(blocks == common(tables, shareable, list(rows)) for rows, blocks in found)
        saved += gain([(len(rows), blocks) for rows, blocks in found], cost, 4)
        best = max(
            gain([(len(part), common(tables, shareable, part)) for part in parts], cost, 4)
            for parts in partitions(list(range(len(tables))))
        )
        possible += best if best >= cost.per_step else 0
    assert 0.98 * possible <= saved <= possible


@given(st.integers(0, 2**32), st.integers(1, 200), st.integers(1, 40))
def test_groups_of_many_rows_are_shared_indeed_and_fit_the_arrays(seed: int, num_rows: int, width: int) -> None:
    tables, shareable = random_tables(np.random.default_rng(seed), num_rows, width)
    found = find_shared_prefixes(tables, shareable, 4, FREE)
    assert len(found) <= max_groups(num_rows)
    members = [row for rows, _ in found for row in rows]
    assert len(members) == len(set(members))
    for rows, num_blocks in found:
        assert len(rows) > 1
        assert 0 < num_blocks <= shareable[list(rows)].min()
        assert (tables[list(rows), :num_blocks] == tables[rows[0], :num_blocks]).all()
    arrays = fill_cascade_arrays(found, num_rows, 4)
    groups = arrays["cascade_groups"].reshape(-1, 3)
    for i, (rows, num_blocks) in enumerate(found):
        first, count, shared = groups[i]
        assert tuple(arrays["cascade_members"][first : first + count]) == rows
        assert shared == num_blocks * 4
        assert (arrays["cascade_group_of_row"][list(rows)] == i).all()
    assert not groups[len(found) :].any()
    assert (arrays["cascade_group_of_row"] >= 0).sum() == groups[:, 1].sum()


def prompts(*groups: tuple[int, int]) -> tuple[IntArray, IntArray]:
    """Make rows of 100 blocks from groups: numbers of rows and of shared blocks. All but the last may be shared."""
    num_rows = sum(count for count, _ in groups)
    tables = np.arange(num_rows * 100, dtype=np.int32).reshape(num_rows, 100)
    first = 0
    for count, blocks in groups:
        tables[first : first + count, :blocks] = tables[first, :blocks]
        first += count
    return tables, np.full(num_rows, 99, dtype=np.int32)


def test_many_that_share_little_or_few_that_share_much_whichever_saves_more() -> None:
    tables, shareable = prompts((4, 50), (4, 50))
    tables[:, :8] = tables[0, :8]
    assert find_shared_prefixes(tables, shareable, 16, FREE) == [
        SharedPrefix((0, 1, 2, 3), 50),
        SharedPrefix((4, 5, 6, 7), 50),
    ]  # 2 * 3 * 50 blocks are not read, not 7 * 8
    alone = np.arange(100_000, 100_600, dtype=np.int32).reshape(6, 100)
    alone[:, :8] = tables[0, :8]
    assert find_shared_prefixes(np.concatenate((tables, alone)), np.full(14, 99, dtype=np.int32), 16, FREE) == [
        SharedPrefix((0, 1, 2, 3), 50),
        SharedPrefix((4, 5, 6, 7), 50),
        SharedPrefix((8, 9, 10, 11, 12, 13), 8),
    ]  # of a prefix that all have, those with more in common read what they share by themselves
    tables[:, :45] = tables[0, :45]
    assert find_shared_prefixes(tables, shareable, 16, FREE) == [SharedPrefix(tuple(range(8)), 45)]  # 7 * 45


@pytest.mark.parametrize("depth", [1, 63, 64, 65, 511, 512, 513, 700])
def test_rows_that_share_much_or_little_are_found_in_tables_of_any_width(depth: int) -> None:
    tables = np.arange(3 * 900, dtype=np.int32).reshape(3, 900)
    tables[2, :depth] = tables[0, :depth]
    shareable = np.array([700, 900, 800], dtype=np.int32)
    assert find_shared_prefixes(tables, shareable, 16, FREE) == [SharedPrefix((0, 2), depth)]
    assert find_shared_prefixes(tables, shareable[[2, 1, 0]], 16, FREE, np.array([2, 1, 0])) == [
        SharedPrefix((0, 2), depth)
    ]
    assert find_shared_prefixes(tables, shareable[:2], 16, FREE, np.array([1, 2])) == []


def test_long_contexts_that_share_a_short_prefix_are_not_read_to_their_ends() -> None:
    """Regression: 256 rows of up to 8,192 blocks, which began with the same four, took the host 60 ms a step."""
    tables = np.arange(64 * 4096, dtype=np.int32).reshape(64, 4096)
    tables[:, :4] = tables[0, :4]
    shareable = np.arange(4000, 4064, dtype=np.int32)
    tracemalloc.start()
    found = find_shared_prefixes(tables, shareable, 16, FREE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [SharedPrefix(tuple(range(64)), 4)]
    assert peak < tables.nbytes / 8


def test_the_last_tokens_block_is_not_shared() -> None:
    assert num_shareable_blocks(np.array([0, 1, 16, 17, 32, 33], dtype=np.int32), 16).tolist() == [0, 0, 0, 1, 1, 2]
    tables, _ = prompts((2, 100))
    assert find_shared_prefixes(tables, np.array([0, 9], dtype=np.int32), 16, FREE) == []
    assert find_shared_prefixes(tables, np.array([3, 9], dtype=np.int32), 16, FREE) == [SharedPrefix((0, 1), 3)]


LLAMA_8B = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("count", "blocks", "pays"),
    [(2, 99, False), (2, 10, False), (4, 80, True), (8, 32, True), (8, 16, False), (64, 8, True), (64, 2, False)],
)
def test_sharing_is_used_when_it_saves_more_than_another_kernel_costs(count: int, blocks: int, pays: bool) -> None:
    tables, shareable = prompts((count, blocks), (3, 0))
    found = find_shared_prefixes(tables, shareable, 16, sharing_cost(LLAMA_8B))
    assert found == ([SharedPrefix(tuple(range(count)), blocks)] if pays else [])


def test_groups_that_cost_more_than_they_save_are_left_out_beside_others() -> None:
    tables, shareable = prompts((2, 1), (8, 64), (2, 30))
    found = find_shared_prefixes(tables, shareable, 16, sharing_cost(LLAMA_8B))
    assert sorted(found) == [SharedPrefix((2, 3, 4, 5, 6, 7, 8, 9), 64), SharedPrefix((10, 11), 30)]


def test_no_rows_and_no_blocks_share_nothing() -> None:
    empty = np.zeros((0, 5), dtype=np.int32)
    assert find_shared_prefixes(empty, np.zeros(0, dtype=np.int32), 16, FREE) == []
    assert find_shared_prefixes(np.zeros((3, 0), dtype=np.int32), np.zeros(3, dtype=np.int32), 16, FREE) == []
    arrays = fill_cascade_arrays([], 1, 16)
    assert {name: (len(array), torch.int32) for name, array in arrays.items()} == cascade_arrays(1)
    assert arrays["cascade_group_of_row"].tolist() == [-1]
