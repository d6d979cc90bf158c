"""Adapters of attention libraries, with doubles of the libraries: what they are handed over gives our attention.

The doubles do what the libraries' documents say, in plain torch; the pool is NaN wherever no row has written.
"""

import math
from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention.decode_reference import DecodeRows
from kernels.attention.prefill_reference import PrefillRows
from kernels.attention.shape import AttentionShape, ScoreRule
from tests.kernels.decode_cases import DecodeCase, decode_case
from tests.kernels.prefill_cases import PrefillCase, prefill_case
from tests.worker.device.flash_attention_double import FlashAttentionDouble
from tests.worker.device.flashinfer_double import FlashInferDouble
from tests.worker.device.recorded_graphs import RecordedGraphs
from tests.worker.device.simulated_streams import SimulatedStreams
from worker_svc.gpu.libraries.block_lists import BlockLists, SentBlockLists, block_lists
from worker_svc.gpu.libraries.flash_attention import FlashAttention
from worker_svc.gpu.libraries.flashinfer import FlashInfer, FlashInferPasses
from worker_svc.gpu.libraries.library import AttentionLibrary, LibrarySetup

CPU = torch.device("cpu")
MAKE: dict[str, Callable[[RecordedGraphs], AttentionLibrary]] = {
    "flash-attn": lambda graphs: FlashAttention(FlashAttentionDouble(graphs.recorded), "3"),
    "flashinfer": lambda graphs: FlashInfer(FlashInferDouble(graphs.recorded, lambda: graphs.is_capturing), "0"),
}
HEADS = st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)])
BLOCK_SIZES = st.sampled_from([1, 4, 16])
SCALES = st.sampled_from([0.1, 0.25])
HOPPER, AMPERE, BLACKWELL, TURING = (9, 0), (8, 0), (10, 0), (7, 5)


def setup_of(case: DecodeCase | PrefillCase, scale: float) -> LibrarySetup:
    return LibrarySetup(
        shape=case.shape,
        rule=ScoreRule(scale),
        block_size=case.block_size,
        device=CPU,
        max_rows=16,
        max_blocks=case.rows.block_tables.shape[1],
        max_tokens=256,
    )


def lists_of(case: DecodeCase | PrefillCase, query_lens: Tensor, num_rows: int, padding_queries: int) -> BlockLists:
    contexts, tables = (tensor.numpy() for tensor in (case.rows.context_lens, case.rows.block_tables))
    return block_lists(query_lens.numpy(), contexts.astype("int64"), tables, case.block_size, num_rows, padding_queries)


def sent(lists: BlockLists) -> SentBlockLists:
    return SentBlockLists(lists, torch.from_numpy(lists.blocks))


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    heads=HEADS,
    block_size=BLOCK_SIZES,
    scale=SCALES,
    seed=st.integers(0, 99),
)
def test_rows_of_one_token_attend_as_the_formula_says(
    name: str, lengths: list[int], heads: tuple[int, int], block_size: int, scale: float, seed: int
) -> None:
    case = decode_case(lengths, heads=heads, head_dim=8, block_size=block_size, seed=seed)
    passes = MAKE[name](RecordedGraphs()).passes(setup_of(case, scale))
    attention = passes.decode(case.rows)
    if passes.needs_block_lists:
        ones = torch.ones(len(lengths), dtype=torch.int64)
        passes.plan_decode(sent(lists_of(case, ones, len(lengths), 1)))
    out = torch.full(case.query.shape, math.nan)
    attention.attend(case.query, case.key_cache, case.value_cache, out)
    expected, _ = case.by_formula(ScoreRule(scale), None, torch.float64)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=30)
@given(
    rows=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=5),
    heads=HEADS,
    block_size=BLOCK_SIZES,
    scale=SCALES,
    padding=st.tuples(st.integers(0, 4), st.integers(0, 9)),
    seed=st.integers(0, 99),
)
def test_rows_of_any_number_of_tokens_attend_as_the_formula_says(
    name: str,
    is_padded: bool,
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    scale: float,
    padding: tuple[int, int],
    seed: int,
) -> None:
    """Rows of one token, chunks and whole prompts together; a padded pass is captured with a plan of padding alone,
    and its padding keeps its zeros.
    """
    lengths = [(queries, queries + before) for queries, before in rows]
    case = prefill_case(lengths, heads=heads, head_dim=8, block_size=block_size, seed=seed)
    more_rows, more_tokens = padding if is_padded else (0, 0)
    num_rows, num_tokens = len(rows) + more_rows, len(case.query) + more_tokens
    graphs = RecordedGraphs()
    passes = MAKE[name](graphs).passes(setup_of(case, scale))
    query = torch.cat((case.query, torch.full((more_tokens, *case.query.shape[1:]), math.nan)))
    out = torch.zeros(query.shape)
    if is_padded:
        passes.prepare_mixed(num_tokens, num_rows)
    attention = passes.mixed(padded_rows(case, more_rows), num_tokens, is_padded=is_padded)

    def launch() -> None:
        attention.attend(query, case.key_cache, case.value_cache, out)

    if is_padded:
        launch = graphs.capture(launch).replay
        out.zero_()
    if passes.needs_block_lists:
        lists = lists_of(case, torch.tensor(case.query_lens), num_rows, 0)
        passes.plan_mixed(sent(lists), num_tokens, is_padded=is_padded)
    launch()
    expected, _ = case.by_formula(ScoreRule(scale), None, torch.float64)
    torch.testing.assert_close(out[: len(expected)].double(), expected, rtol=1e-4, atol=1e-4)
    assert not out[len(expected) :].any()


def padded_rows(case: PrefillCase, more: int) -> PrefillRows:
    """Add rows without queries and keys."""
    starts, contexts, tables = case.rows.query_start, case.rows.context_lens, case.rows.block_tables
    return PrefillRows(
        torch.cat((starts, starts[-1:].expand(more))).contiguous(),
        torch.cat((contexts, torch.zeros(more, dtype=torch.int32))),
        torch.cat((tables, torch.zeros((more, tables.shape[1]), dtype=torch.int32))),
    )


@settings(max_examples=15)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=3, max_size=3), min_size=2, max_size=6
    ),
    is_decode=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_a_plan_is_not_overwritten_before_the_device_has_copied_it(
    steps: list[list[tuple[int, int]]], is_decode: bool, seed: int
) -> None:
    """Launch steps of one size far ahead of a device that does its work later, each with other rows."""
    cases = [
        prefill_case([(1 if is_decode else queries, queries + before) for queries, before in rows], head_dim=8, seed=n)
        for n, rows in enumerate(steps)
    ]
    streams = SimulatedStreams(Random(seed))
    widest = max(cases, key=lambda case: case.rows.block_tables.shape[1])
    passes = FlashInferPasses(FlashInferDouble(queue=streams.queue), setup_of(widest, 0.2), streams)
    most = max(len(case.query) for case in cases)
    if not is_decode:
        passes.prepare_mixed(most, 3)
    outs = [torch.zeros(case.query.shape) for case in cases]
    for case, out in zip(cases, outs, strict=True):
        lists = sent(lists_of(case, torch.tensor(case.query_lens), 3, 0))
        if is_decode:
            attention = passes.decode(DecodeRows(case.rows.context_lens, case.rows.block_tables))
            passes.plan_decode(lists)
        else:
            attention = passes.mixed(case.rows, most, is_padded=True)
            passes.plan_mixed(lists, most, is_padded=True)
        attention.attend(case.query, case.key_cache, case.value_cache, out)
    streams.both.run()
    for case, out in zip(cases, outs, strict=True):
        expected, _ = case.by_formula(ScoreRule(0.2), None, torch.float64)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def shape_with(
    head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, kv: torch.dtype | None = None
) -> AttentionShape:
    return AttentionShape(num_heads=8, num_kv_heads=2, head_dim=head_dim, dtype=dtype, kv_dtype=kv or dtype)


@pytest.mark.parametrize(
    ("name", "shape", "rule", "capability", "said"),
    [
        ("flash-attn", shape_with(), ScoreRule(0.1), HOPPER, None),
        ("flash-attn", shape_with(80), ScoreRule(0.1), HOPPER, None),
        ("flash-attn", shape_with(), ScoreRule(0.1), AMPERE, "for compute capability 9.0, and the device has 8.0"),
        ("flash-attn", shape_with(), ScoreRule(0.1), BLACKWELL, "the device has 10.0"),
        ("flash-attn", shape_with(260), ScoreRule(0.1), HOPPER, "heads have 260 elements"),
        ("flash-attn", shape_with(20), ScoreRule(0.1), HOPPER, "heads have 20 elements"),
        ("flashinfer", shape_with(), ScoreRule(0.1), AMPERE, None),
        ("flashinfer", shape_with(64, torch.float16), ScoreRule(0.1), BLACKWELL, None),
        ("flashinfer", shape_with(), ScoreRule(0.1), TURING, "needs compute capability 8.0, and the device has 7.5"),
        ("flashinfer", shape_with(80), ScoreRule(0.1), HOPPER, "heads have 80 elements, and it takes 64, 128, 256"),
        ("flashinfer", shape_with(dtype=torch.float32), ScoreRule(0.1), HOPPER, "and the model in float32"),
        ("flashinfer", shape_with(kv=torch.float8_e4m3fn), ScoreRule(0.1), HOPPER, "keys and values of float8_e4m3fn"),
        ("flash-attn", shape_with(kv=torch.float8_e4m3fn), ScoreRule(0.1), HOPPER, "keys and values of float8_e4m3fn"),
        ("flash-attn", shape_with(), ScoreRule(0.1, 30.0), HOPPER, "scores have a soft cap"),
    ],
)
def test_what_a_library_does_not_compute_it_says(
    name: str, shape: AttentionShape, rule: ScoreRule, capability: tuple[int, int], said: str | None
) -> None:
    why_not = MAKE[name](RecordedGraphs()).why_not(shape, rule, capability)
    assert why_not is None if said is None else said in (why_not or "")


def test_a_launch_without_its_plan_is_seen() -> None:
    """Show that the double sees launches without a plan, so that the tests with it can fail."""
    case = prefill_case([(3, 9), (1, 4)], head_dim=8, block_size=4)
    passes = MAKE["flashinfer"](RecordedGraphs()).passes(setup_of(case, 0.1))
    attention = passes.mixed(case.rows, len(case.query), is_padded=False)
    out = torch.zeros(case.query.shape)
    with pytest.raises(AssertionError, match="nothing was planned"):
        attention.attend(case.query, case.key_cache, case.value_cache, out)
    passes.plan_mixed(sent(lists_of(case, torch.tensor([2, 1]), 2, 0)), len(case.query), is_padded=False)
    with pytest.raises(AssertionError, match="as many queries as were planned"):
        attention.attend(case.query, case.key_cache, case.value_cache, out)
