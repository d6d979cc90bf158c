"""Layer operations of a CPU runner beside products and attention, against the formulas in float32."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.layers.layer_ops import Activation, activate
from kernels.native.cpu_kernels import CacheShape, CpuKernels, GreedyTokens, HeadNorms, NormRule, layer_caches
from tests.kernels.native.attention_cases import attention_case

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# Rounded once to the dtype: a unit in the last place, where what is rounded is by the order of sums beside a tie.
TOLERANCE = {torch.float32: (2e-6, 2e-6), torch.bfloat16: (2**-7, 1e-6)}  # relative and absolute
SIZES = (1, 7, 16, 17, 100, 768)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def _rows(num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Make rows with a stride of their own."""
    return torch.randn(num_rows, size + 5).to(dtype)[:, :size]


def _close(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=rtol, atol=atol)


@DTYPES
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_a_residual_is_added_and_normalised(kernels: CpuKernels, num_rows: int, rms: bool, dtype: torch.dtype) -> None:
    for size in SIZES:
        x, residual = _rows(num_rows, size, dtype), _rows(num_rows, size, dtype)
        weight, bias = torch.randn(size).to(dtype), None if rms else torch.randn(size).to(dtype)
        expected_sum = (x.float() + residual.float()).to(dtype)
        out = torch.full_like(x, math.nan)
        kernels.add_norm(x, residual, NormRule(weight, bias, 1e-5, rms), out)
        assert torch.equal(residual, expected_sum)
        _close(out, _norm(expected_sum, weight, bias, rms))


@DTYPES
@pytest.mark.parametrize("rms", [True, False])
def test_a_residual_is_added_to_normalised_rows(kernels: CpuKernels, rms: bool, dtype: torch.dtype) -> None:
    for size in SIZES:
        x, residual = _rows(3, size, dtype), _rows(3, size, dtype)
        before, out = residual.clone(), torch.full_like(x, math.nan)
        kernels.add_norm(x, residual, NormRule(None, None, 1e-5, rms, then_add=True), out)
        assert torch.equal(residual, before)
        _close(out, before.float() + _norm(x, None, None, rms).float())


@DTYPES
@pytest.mark.parametrize("rms", [True, False])
def test_without_residual_rows_are_normalised_even_in_place(kernels: CpuKernels, rms: bool, dtype: torch.dtype) -> None:
    x = _rows(5, 33, dtype)
    expected = _norm(x, None, None, rms)
    kernels.add_norm(x, None, NormRule(None, None, 1e-5, rms), x)
    _close(x, expected)


def test_a_mean_far_from_zero_costs_layer_norm_no_accuracy(kernels: CpuKernels) -> None:
    x = torch.randn(2, 768) + 1000.0
    out = torch.empty_like(x)
    kernels.add_norm(x, None, NormRule(None, None, 1e-5, False), out)
    exact = F.layer_norm(x.double(), (768,), eps=1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, rms: bool) -> Tensor:
    size = (x.shape[1],)
    wide = None if weight is None else weight.float()
    if rms:
        return F.rms_norm(x.float(), size, wide, 1e-5)
    return F.layer_norm(x.float(), size, wide, None if bias is None else bias.float(), 1e-5)


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_activations_gated_and_plain_follow_their_formulas(
    kernels: CpuKernels, num_rows: int, activation: Activation
) -> None:
    for size in SIZES:
        x = _rows(num_rows, 2 * size, torch.float32) * 4
        out = torch.full((num_rows, size + 3), math.nan)[:, :size]
        kernels.gated_activation(x, activation, out)
        gate, up = x.chunk(2, dim=1)
        torch.testing.assert_close(out, activate(gate, activation) * up, rtol=1e-5, atol=1e-5)
        expected = activate(x, activation)
        kernels.activation(x, activation, x)
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_activations_of_bfloat16_err_no_more_than_torchs(kernels: CpuKernels, activation: Activation) -> None:
    x = (torch.randn(3, 200) * 4).bfloat16()
    out = torch.empty(3, 100, dtype=torch.bfloat16)
    kernels.gated_activation(x, activation, out)
    gate, up = x.float().chunk(2, dim=1)
    torch.testing.assert_close(out.float(), activate(gate, activation) * up, rtol=2**-7, atol=1e-6)


def test_activations_of_extremes_are_finite_where_they_should_be(kernels: CpuKernels) -> None:
    x = torch.tensor([[-1e4, -100.0, -0.0, 100.0, 1e4, math.nan]])
    for activation in ("silu", "gelu_tanh", "gelu", "relu"):
        out = torch.empty_like(x)
        kernels.activation(x, activation, out)
        torch.testing.assert_close(out[0, :5], torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4]), atol=1e-6, rtol=1e-6)
        assert out[0, 5].isnan()


@DTYPES
@pytest.mark.parametrize("rotary_dim", [0, 8, 32])
@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("normed", [False, True])
def test_queries_and_keys_turn_and_reach_their_slots(
    kernels: CpuKernels, normed: bool, block_size: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    """Attention over what was written, by queries that were turned, is that over turned keys."""
    heads, kv_heads, dim, context = 4, 2, 32, 37
    shape = CacheShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, block_size=block_size, dtype=dtype)
    case = attention_case(kernels, [(context, context)], heads=(heads, kv_heads), block_size=block_size, dtype=dtype)
    num_blocks = -(-context // block_size)
    pool = torch.full((num_blocks, 1, 2, shape.side_numel), math.nan, dtype=dtype)
    cache = layer_caches(pool, shape)[0]
    qkv = torch.randn(context, (heads + 2 * kv_heads) * dim).to(dtype)
    table = torch.randn(2 * context, rotary_dim)
    positions = torch.randperm(2 * context)[:context]
    norms = HeadNorms(torch.randn(dim).to(dtype), torch.randn(dim).to(dtype), 1e-6) if normed else None
    query, key, value = qkv.float().view(context, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        query = F.rms_norm(query, (dim,), norms.query.float(), 1e-6).to(dtype).float()
        key = F.rms_norm(key, (dim,), norms.key.float(), 1e-6).to(dtype).float()
    turned_query, turned_key = (_turned(x, table[positions]).to(dtype) for x in (query, key))
    rotary = table if rotary_dim else None
    kernels.rotate_and_write(qkv, rotary, positions, torch.arange(context), cache, norms)
    _close(qkv[:, : heads * dim], turned_query.flatten(1))
    rows = case.rows
    rows.block_tables[0, :num_blocks] = torch.arange(num_blocks)
    plan = kernels.plan(rows, cache, None)
    out = torch.empty(context, heads * dim, dtype=dtype)
    kernels.attend(turned_query.flatten(1), cache, plan, 0.2, out)
    keys, values = (x.double().transpose(0, 1).repeat_interleave(2, 0) for x in (turned_key, value))
    queries = turned_query.double().transpose(0, 1)
    expected = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=0.2)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(out.double(), expected.transpose(0, 1).flatten(1), rtol=tolerance, atol=tolerance)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.unsqueeze(1).chunk(2, dim=2)
    half = cos.shape[2]
    first, second, rest = x.split([half, half, x.shape[2] - 2 * half], dim=2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=2)


@DTYPES
@pytest.mark.parametrize("block_size", [16, 5])
def test_padding_is_not_written_and_a_token_touches_its_own_slot_alone(
    kernels: CpuKernels, block_size: int, dtype: torch.dtype
) -> None:
    shape = CacheShape(num_heads=2, num_kv_heads=2, head_dim=16, block_size=block_size, dtype=dtype)
    pool = torch.zeros((4, 2, 2, shape.side_numel), dtype=dtype)
    qkv = torch.ones(3, 6 * 16, dtype=dtype)
    cache = layer_caches(pool, shape)[1]
    kernels.rotate_and_write(qkv, None, torch.arange(3), torch.tensor([block_size + 3, -1, 2 * block_size]), cache)
    assert pool.count_nonzero(dim=(2, 3)).tolist() == [[0, 0], [0, 64], [0, 64], [0, 0]]


@DTYPES
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_gathered_and_tokens_embedded(kernels: CpuKernels, size: int, dtype: torch.dtype) -> None:
    table, places = _rows(9, size, dtype), torch.tensor([8, 0, 3, 3])
    for fill in (kernels.gather_rows, kernels.embed):
        out = torch.full((4, size), math.nan, dtype=dtype)
        fill(table, places, out)
        assert torch.equal(out, table[places])


@DTYPES
@pytest.mark.parametrize("size", [1, 5, 1000, 1024, 1025, 32_001])
@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_the_first_of_the_greatest_is_chosen(kernels: CpuKernels, num_rows: int, size: int, dtype: torch.dtype) -> None:
    logits = _rows(num_rows, size, dtype)
    chosen = _greedy(kernels, logits)
    expected = [(row == row.max()).nonzero()[0].item() for row in logits]
    assert chosen.token_ids.tolist() == expected
    assert chosen.is_finite.all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1499, 2999])
def test_a_row_that_is_not_finite_is_told_apart(kernels: CpuKernels, place: int, bad: float) -> None:
    logits = _rows(3, 3000, torch.float32)
    logits[1, place] = bad
    chosen = _greedy(kernels, logits)
    assert chosen.is_finite.tolist() == [True, False, True]
    assert chosen.token_ids[[0, 2]].tolist() == logits[[0, 2]].argmax(1).tolist()
    assert chosen.token_ids[1] == 0


def _greedy(kernels: CpuKernels, logits: torch.Tensor) -> GreedyTokens:
    chosen = GreedyTokens(torch.full((len(logits),), -1), torch.zeros(len(logits), dtype=torch.bool))
    kernels.greedy(logits, chosen)
    return chosen
