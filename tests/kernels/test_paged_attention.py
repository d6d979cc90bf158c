"""Paged attention against its formula, over awkward lengths, scattered blocks and poisoned memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.attention.paged_attention import RaggedRows, paged_attention, plan_attention
from tests.kernels.kv_writes import write_kv

HEAD_DIM = 16
NUM_LAYERS = 3
LAYER = 1  # attention reads a strided view; the layers around it stay poisoned
AWKWARD_LENGTHS = (1, 15, 16, 17, 63, 31, 32, 33, 127, 128, 129)


@dataclass(frozen=True)
class Case:
    """Contiguous queries, keys and values per row, and the same keys and values in blocks."""

    queries: list[Tensor]  # [query_len, num_heads, head_dim]
    keys: list[Tensor]  # [context, num_kv_heads, head_dim]
    values: list[Tensor]
    key_cache: Tensor
    value_cache: Tensor
    rows: RaggedRows

    def attend(self, window: int | None = None) -> Tensor:
        plan = plan_attention(self.rows, self.key_cache, window)
        return paged_attention(torch.cat(self.queries), self.key_cache, self.value_cache, plan, 1 / math.sqrt(HEAD_DIM))

    def expected(self, window: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        triples = zip(self.queries, self.keys, self.values, strict=True)
        return torch.cat([_by_formula(q.to(dtype), k.to(dtype), v.to(dtype), window) for q, k, v in triples])


def _by_formula(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One row, head by head and query by query, with exactly the keys that each may see."""
    num_queries, num_heads, _ = q.shape
    context, num_kv_heads, _ = k.shape
    out = torch.empty_like(q)
    for i in range(num_queries):
        position = context - num_queries + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            shared = head // (num_heads // num_kv_heads)
            scores = k[first : position + 1, shared] @ q[i, head] / math.sqrt(HEAD_DIM)
            out[i, head] = scores.softmax(0) @ v[first : position + 1, shared]
    return out


def _case(
    spans: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Rows of (query_len, context), in shuffled blocks of a pool that is NaN wherever no row has written."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads

    def random(length: int, width: int) -> Tensor:
        return torch.randn(length, width, HEAD_DIM, generator=generator).to(dtype)

    queries = [random(query_len, num_heads) for query_len, _ in spans]
    keys = [random(context, num_kv_heads) for _, context in spans]
    values = [random(context, num_kv_heads) for _, context in spans]
    counts = [-(-context // block_size) for _, context in spans]
    num_blocks = sum(counts) + 3
    pool = torch.full((num_blocks, NUM_LAYERS, 2, block_size, num_kv_heads, HEAD_DIM), math.nan, dtype=dtype)
    key_cache, value_cache = pool[:, LAYER, 0], pool[:, LAYER, 1]
    blocks = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = torch.zeros(len(spans), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([next(blocks) for _ in range(count)])
        position = torch.arange(spans[row][1])
        slots = tables[row].long()[position // block_size] * block_size + position % block_size
        write_kv(keys[row], values[row], key_cache, value_cache, slots)
    lengths = torch.tensor([query_len for query_len, _ in spans])
    rows = RaggedRows(
        query_start=torch.cat((torch.zeros(1), lengths.cumsum(0))).to(torch.int32),
        context_lens=torch.tensor([context for _, context in spans], dtype=torch.int32),
        block_tables=tables,
        max_query_len=int(lengths.max()),
        max_context_len=max(context for _, context in spans),
    )
    return Case(queries, keys, values, key_cache, value_cache, rows)


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (5, 1)])
def test_decode_rows_of_awkward_lengths_follow_the_formula(heads: tuple[int, int], block_size: int) -> None:
    case = _case([(1, length) for length in AWKWARD_LENGTHS], heads=heads, block_size=block_size)
    torch.testing.assert_close(case.attend().double(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_whole_prompts_follow_the_formula(heads: tuple[int, int], block_size: int) -> None:
    case = _case([(length, length) for length in (2, 15, 16, 17, 33)], heads=heads, block_size=block_size)
    torch.testing.assert_close(case.attend().double(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 7, 16, 200])
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_chunks_prompts_and_decode_rows_in_one_call_follow_the_formula(window: int | None, block_size: int) -> None:
    spans = [(1, 1), (17, 17), (1, 64), (5, 33), (1, 17), (16, 48), (2, 63), (1, 129), (1, 15), (31, 32)]
    case = _case(spans, block_size=block_size)
    torch.testing.assert_close(case.attend(window).double(), case.expected(window), rtol=1e-5, atol=1e-5)


def test_one_long_row_among_many_short_ones_follows_the_formula() -> None:
    case = _case([(1, 700), *[(1, 1 + row) for row in range(20)]])
    torch.testing.assert_close(case.attend().double(), case.expected(), rtol=1e-5, atol=1e-5)


def test_many_long_rows_are_gathered_in_groups_and_follow_the_formula() -> None:
    # 2 key-value heads of 16: 32 elements a key, so a group holds 12288 keys, and 30 rows of 450 to 479 need two
    case = _case([(1, 450 + (7 * row) % 30) for row in range(30)])
    assert len(plan_attention(case.rows, case.key_cache).decode_groups) == 2
    torch.testing.assert_close(case.attend().double(), case.expected(), rtol=1e-5, atol=1e-5)


def test_rows_may_share_blocks() -> None:
    case = _case([(1, 40), (1, 40)])
    case.rows.block_tables[1, :2] = case.rows.block_tables[0, :2]
    case.keys[1][:32], case.values[1][:32] = case.keys[0][:32], case.values[0][:32]
    torch.testing.assert_close(case.attend().double(), case.expected(), rtol=1e-5, atol=1e-5)


def test_a_row_without_queries_is_passed_over() -> None:
    case = _case([(1, 20), (0, 5), (3, 9)])
    torch.testing.assert_close(case.attend().double(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_at_least_half_as_exact_as_plain_torch(dtype: torch.dtype) -> None:
    case = _case([(1, 129), (33, 33), (9, 65), (1, 17)], dtype=dtype)
    exact = case.expected()
    plain_error = (case.expected(dtype=dtype).double() - exact).abs()
    error = (case.attend().double() - exact).abs()
    assert case.attend().dtype == dtype
    assert error.max() <= 2 * plain_error.max() + torch.finfo(dtype).eps
    assert error.mean() <= 2 * plain_error.mean() + torch.finfo(dtype).eps / 10
