"""The CPU's attention follows its formula, over awkward lengths, scattered blocks and poisoned memory."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels.native.cpu_kernels import CpuKernels
from kernels.native.native_kernels import NativeKernels
from tests.kernels.native.attention_cases import DECODE, DTYPES, PREFILL, SLACK, attention_case


@DTYPES
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1), (48, 1)])
@pytest.mark.parametrize("spans", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_attention_is_as_good_as_the_formula_in_its_dtype(
    kernels: CpuKernels, heads: tuple[int, int], spans: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    case = attention_case(kernels, spans, heads=heads, dtype=dtype)
    error, own = case.error(kernels)
    assert error <= 2 * own + SLACK[dtype]


@DTYPES
@pytest.mark.parametrize("block_size", [1, 5, 8, 48, 256])
def test_blocks_of_any_size_are_read_in_place(kernels: CpuKernels, block_size: int, dtype: torch.dtype) -> None:
    case = attention_case(kernels, [*DECODE, *PREFILL], block_size=block_size, dtype=dtype)
    error, own = case.error(kernels)
    assert error <= 2 * own + SLACK[dtype]


@DTYPES
@pytest.mark.parametrize("head_dim", [16, 20, 64, 80, 256])
def test_heads_of_any_size_are_attended(kernels: CpuKernels, head_dim: int, dtype: torch.dtype) -> None:
    case = attention_case(kernels, [(1, 65), (19, 19), (1, 7), (5, 40)], heads=(3, 1), head_dim=head_dim, dtype=dtype)
    error, own = case.error(kernels)
    assert error <= 2 * own + SLACK[dtype]


@DTYPES
@pytest.mark.parametrize("block_size", [16, 12])
@pytest.mark.parametrize("window", [1, 7, 17, 40])
def test_a_window_hides_what_is_before_it(
    kernels: CpuKernels, window: int, block_size: int, dtype: torch.dtype
) -> None:
    case = attention_case(kernels, [*DECODE, *PREFILL], block_size=block_size, dtype=dtype)
    error, own = case.error(kernels, window)
    assert error <= 2 * own + SLACK[dtype]


@DTYPES
@pytest.mark.parametrize("window", [None, 900])
def test_a_long_context_alone_is_split(
    native_on_two_threads: NativeKernels, window: int | None, dtype: torch.dtype
) -> None:
    native = native_on_two_threads
    case = attention_case(native, [(1, 2500)], heads=(2, 1), dtype=dtype)
    plan = native.plan(case.rows, case.cache, window)
    assert native.num_units(plan) > 1  # of one row with one key-value head
    error, own = case.error(native, window)
    assert error <= 2 * own + SLACK[dtype]


@DTYPES
def test_a_long_prompt_beside_its_decoding_neighbours_is_attended(native: NativeKernels, dtype: torch.dtype) -> None:
    case = attention_case(native, [(1, 3), (40, 1300), (1, 700)], heads=(6, 2), dtype=dtype)
    error, own = case.error(native)
    assert error <= 2 * own + SLACK[dtype]


def test_great_scores_do_not_overflow(kernels: CpuKernels) -> None:
    case = attention_case(kernels, [(1, 100), (5, 70)])
    case.qkv.mul_(1000.0)  # scores in the thousands, whose exponentials no float32 holds
    torch.testing.assert_close(case.attend(kernels).double(), case.expected(), rtol=1e-4, atol=1e-4)


def test_a_query_that_is_not_finite_spoils_its_own_row_alone(kernels: CpuKernels) -> None:
    case = attention_case(kernels, [(1, 100), (1, 70)])
    case.query[0] = torch.nan
    out = case.attend(kernels)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_rows_without_queries_and_tokens_of_no_row_are_left_alone(kernels: CpuKernels) -> None:
    case = attention_case(kernels, [(0, 20), (2, 40), (0, 16), (1, 5)])
    out = case.attend(kernels)
    torch.testing.assert_close(out.double(), case.expected(), rtol=1e-5, atol=1e-5)


def test_one_plan_serves_step_after_step(native: NativeKernels) -> None:
    # The memory of a plan is kept and grows; a small step after a large one sees nothing of it.
    for spans in ([(1, 700), (64, 64)], [(1, 1)], [(3, 90)] * 7):
        case = attention_case(native, spans, seed=len(spans))
        error, own = case.error(native)
        assert error <= 2 * own + SLACK[torch.float32]


@DTYPES
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("block_size", [16, 12])
def test_a_query_gets_the_same_bits_whoever_is_beside_it_and_however_its_prompt_is_cut(
    native: NativeKernels, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    length = 1100
    case = attention_case(native, [(length, length)], heads=(3, 1), block_size=block_size, dtype=dtype)
    whole = case.attend(native, window)
    for cuts in ([0, 1, 2, 37, 600, 601, length - 1, length], [0, length - 40, length]):
        for begin, end in pairwise(cuts):
            piece = replace(
                case,
                qkv=case.qkv[begin:end],
                rows=replace(
                    case.rows,
                    query_start=torch.tensor([0, end - begin], dtype=torch.int32),
                    context_lens=torch.tensor([end], dtype=torch.int32),
                ),
            )
            assert torch.equal(piece.attend(native, window), whole[begin:end]), (begin, end)
