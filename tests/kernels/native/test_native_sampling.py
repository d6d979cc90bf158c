"""Sampling in native code: the tokens, candidates and log-probabilities of the torch references, row by row."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.native.native_kernels import NativeKernels
from kernels.sampling.choice_reference import ChosenTokens
from kernels.sampling.logit_edits import LogitEdits, TokenPairs
from kernels.sampling.sampling_operations import REFERENCES, SamplingOperations
from tests.kernels.native.sampling_cases import (
    LOGIT_KINDS,
    Parameters,
    one_of,
    random_edits,
    random_logits,
    sample_rows,
)

torch.set_num_threads(1)  # on contended cores two threads mostly wait for each other

NO_TABLE = torch.zeros((1, 1), dtype=torch.int32)
DTYPES = (torch.float32, torch.bfloat16)

parameters = st.builds(
    Parameters,
    temperature=st.sampled_from([0.0, 1.0]) | st.floats(2.0**-10, 100.0, width=32),
    min_p=st.sampled_from([0.0, 0.0, 1.0, 1e-9]) | st.floats(0.0, 1.0),
    top_k=st.sampled_from([None, None, 1, 10**6]) | st.integers(1, 3000),
    top_p=st.sampled_from([1.0, 1.0, 1e-12, 0.999999]) | st.floats(1e-6, 1.0),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**20),
)
vocab_sizes = st.integers(2, 300) | st.sampled_from([1000, 4095, 50_272])


def assert_same_tokens(found: ChosenTokens, expected: ChosenTokens) -> None:
    assert (found.token_ids.dtype, found.valid.dtype) == (torch.int32, torch.bool)
    assert found.valid.tolist() == expected.valid.tolist()
    assert found.token_ids.tolist() == expected.token_ids.tolist()


@pytest.fixture(params=["one thread", "two threads"])
def operations(
    request: pytest.FixtureRequest, native: NativeKernels, native_on_two_threads: NativeKernels
) -> SamplingOperations:
    return (native if request.param == "one thread" else native_on_two_threads).sampling


@pytest.fixture(scope="session")
def native_operations(native: NativeKernels) -> SamplingOperations:
    return native.sampling


@pytest.mark.long
@settings(max_examples=300)
@given(
    st.lists(parameters, min_size=1, max_size=8),
    vocab_sizes,
    st.sampled_from(LOGIT_KINDS),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_tokens_are_those_of_the_reference(
    native_operations: SamplingOperations,
    asked: list[Parameters],
    vocab_size: int,
    kind: str,
    dtype: torch.dtype,
    seed: int,
    has_edits: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_rows = 1 + seed % len(asked)
    logits = random_logits(kind, num_rows, vocab_size, generator).to(dtype)
    rows = sample_rows(asked, [random.Random(seed + i).randrange(num_rows) for i in range(len(asked))], vocab_size)
    edits, table = random_edits(len(asked), vocab_size, generator) if has_edits else (None, NO_TABLE)
    before = logits.clone()
    found = native_operations.choose_tokens(logits, rows, edits, table)
    assert_same_tokens(found, REFERENCES.choose_tokens(logits, rows, edits, table))
    assert torch.equal(logits, before)


@pytest.mark.long
@pytest.mark.parametrize("vocab_size", [50_272, 150_000])
@pytest.mark.parametrize("kind", LOGIT_KINDS)
def test_many_rows_of_a_large_vocabulary(operations: SamplingOperations, kind: str, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    asked = [
        Parameters(),
        Parameters(temperature=0.001),
        Parameters(temperature=100.0),
        Parameters(top_k=50),
        Parameters(top_k=vocab_size - 1, top_p=0.5),
        Parameters(top_p=0.95),
        Parameters(top_p=0.5, temperature=1.5),
        Parameters(temperature=3.0, top_p=0.999),
        Parameters(min_p=0.05),
        Parameters(temperature=0.0),
        Parameters(temperature=0.7, min_p=0.01, top_k=5000, top_p=0.9),
    ]
    asked = [Parameters(**{**vars(each), "seed": i}) for i, each in enumerate(asked)]
    logits = random_logits(kind, len(asked), vocab_size, generator)
    rows = sample_rows(asked, list(range(len(asked))), vocab_size)
    found = operations.choose_tokens(logits, rows, None, NO_TABLE)
    assert_same_tokens(found, REFERENCES.choose_tokens(logits, rows, None, NO_TABLE))
    for i in range(len(asked)):  # whatever else is in the batch
        alone = operations.choose_tokens(logits, one_of(rows, i), None, NO_TABLE)
        assert alone.token_ids.tolist() == found.token_ids[i : i + 1].tolist()


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1.0, 100.0, 1e30])
def test_seeded_draws_are_the_same_over_many_positions(operations: SamplingOperations, temperature: float) -> None:
    logits = random_logits("normal", 1, 997, torch.Generator().manual_seed(3))
    asked = [Parameters(temperature, seed=2**63 + 5, position=i, top_p=1.0 - i % 2 / 3) for i in range(500)]
    rows = sample_rows(asked, [0] * 500, 997)
    found = operations.choose_tokens(logits, rows, None, NO_TABLE)
    assert_same_tokens(found, REFERENCES.choose_tokens(logits, rows, None, NO_TABLE))
    assert temperature < 0.1 or len(set(found.token_ids.tolist())) > 50


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("column", [0, 63, 64, 500, 1000])
def test_a_row_that_is_not_finite_is_not_valid(
    native_operations: SamplingOperations, bad: float, dtype: torch.dtype, column: int
) -> None:
    logits = random_logits("normal", 3, 1001, torch.Generator().manual_seed(1)).to(dtype)
    logits[1, column] = bad
    asked = [Parameters(temperature=temperature, top_k=40, top_p=0.9) for temperature in (1.0, 1.0, 0.0)]
    for logit_rows in ([0, 1, 2], [1, 0, 1]):
        rows = sample_rows(asked, logit_rows, 1001)
        found = native_operations.choose_tokens(logits, rows, None, NO_TABLE)
        assert found.valid.tolist() == [row != 1 for row in logit_rows]
        assert_same_tokens(found, REFERENCES.choose_tokens(logits, rows, None, NO_TABLE))
    best = native_operations.rank_tokens(logits, torch.arange(3, dtype=torch.int32), 4, None, NO_TABLE)
    assert best.valid.tolist() == [True, False, True]
    token_ids = torch.zeros((3, 2), dtype=torch.int64)
    described = native_operations.token_logprobs(logits, torch.arange(3, dtype=torch.int32), token_ids, 3)
    assert described.logprobs.isnan().all(-1).tolist() == [False, True, False]


@pytest.mark.long
@settings(max_examples=200)
@given(
    st.integers(1, 6),
    vocab_sizes,
    st.integers(1, 400),
    st.sampled_from([kind for kind in LOGIT_KINDS if kind != "huge"]),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_candidates_and_logprobs_are_those_of_the_reference(
    native_operations: SamplingOperations,
    num_rows: int,
    vocab_size: int,
    num_best: int,
    kind: str,
    dtype: torch.dtype,
    seed: int,
    has_edits: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_best = min(num_best, vocab_size)
    logits = random_logits(kind, num_rows, vocab_size, generator).to(dtype)
    logit_rows = torch.randint(0, num_rows, (num_rows + 1,), generator=generator, dtype=torch.int32)
    edits, table = random_edits(num_rows + 1, vocab_size, generator) if has_edits else (None, NO_TABLE)
    found = native_operations.rank_tokens(logits, logit_rows, num_best, edits, table)
    expected = REFERENCES.rank_tokens(logits, logit_rows, num_best, edits, table)
    assert found.valid.tolist() == expected.valid.tolist()
    assert_close(found.logprobs, expected.logprobs)
    every_logprob = REFERENCES.rank_tokens(logits, logit_rows, vocab_size, edits, table)
    assert_close(found.logprobs, by_token(every_logprob.token_ids, every_logprob.logprobs).gather(1, found.token_ids))
    for ids, logprobs in zip(found.token_ids.tolist(), found.logprobs.tolist(), strict=True):
        pairs = list(zip(logprobs, ids, strict=True))
        assert pairs == sorted(pairs, key=lambda pair: (-pair[0], pair[1]))
        assert len(set(ids)) == num_best
    described = native_operations.token_logprobs(logits, logit_rows, found.token_ids, num_best)
    reference = REFERENCES.token_logprobs(logits, logit_rows, found.token_ids, num_best)
    assert torch.equal(described.ranks, reference.ranks)
    assert torch.equal(described.top_token_ids, reference.top_token_ids)
    assert_close(described.logprobs, reference.logprobs)
    assert_close(described.top_logprobs, reference.top_logprobs)


def by_token(token_ids: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(values).scatter_(1, token_ids, values)


def assert_close(found: Tensor, expected: Tensor) -> None:
    # Both sum up to 150,000 exponentials in float32, each to some units in the last place.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_barred_comes_last_in_the_order_of_ids(native_operations: SamplingOperations) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = random_logits("normal", 1, 500, generator)
    allowed = TokenPairs(torch.zeros(3, dtype=torch.int64), torch.tensor([400, 3, 90]))
    edits = LogitEdits(allowed, None, None, None, None)
    zero = torch.zeros(1, dtype=torch.int32)
    found = native_operations.rank_tokens(logits, zero, 8, edits, NO_TABLE)
    assert sorted(found.token_ids[0, :3].tolist()) == [3, 90, 400]
    assert found.token_ids[0, 3:].tolist() == [0, 1, 2, 4, 5]
    assert found.logprobs[0, 3:].tolist() == [-math.inf] * 5
    rows = sample_rows([Parameters(top_k=100, top_p=0.99, seed=i) for i in range(50)], [0] * 50, 500)
    pairs = TokenPairs(torch.arange(50).repeat_interleave(3), torch.tensor([400, 3, 90]).repeat(50))
    chosen = native_operations.choose_tokens(logits, rows, LogitEdits(pairs, None, None, None, None), NO_TABLE)
    assert set(chosen.token_ids.tolist()) <= {3, 90, 400}
    none = LogitEdits(pairs, pairs, None, None, None)
    assert not native_operations.choose_tokens(logits, rows, none, NO_TABLE).valid.any()


def test_nothing_is_computed_for_no_rows(native_operations: SamplingOperations) -> None:
    logits, none = torch.randn(2, 10), torch.zeros(0, dtype=torch.int32)
    assert native_operations.choose_tokens(logits, sample_rows([], [], 10), None, NO_TABLE).token_ids.shape == (0,)
    assert native_operations.rank_tokens(logits, none, 3, None, NO_TABLE).token_ids.shape == (0, 3)
    no_ids = torch.zeros((0, 1), dtype=torch.int64)
    assert native_operations.token_logprobs(logits, none, no_ids, 3).top_logprobs.shape == (0, 3)


def test_half_precision_and_spread_values_are_read_as_float32(native_operations: SamplingOperations) -> None:
    logits = random_logits("normal", 2, 300, torch.Generator().manual_seed(4)).to(torch.float16)
    rows = sample_rows([Parameters(top_p=0.9, seed=i) for i in range(20)], [0, 1] * 10, 300)
    expected = native_operations.choose_tokens(logits.float(), rows, None, NO_TABLE).token_ids.tolist()
    for given_logits in (logits, logits.float().t().contiguous().t(), torch.randn(2, 999)[:, :300].copy_(logits)):
        assert native_operations.choose_tokens(given_logits, rows, None, NO_TABLE).token_ids.tolist() == expected
