"""Sampling on the device gives what the host's sampler gives, whatever mix of parameters a step has."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from common.sampling_params import SequenceSampling
from kernels.sampling.sampling import token_logprobs
from tests.worker.device.sampling_cases import (
    SamplingCase,
    assert_same_candidates,
    assert_same_rows,
    assert_same_samples,
    empty_result,
    random_case,
    spoil,
)
from worker_svc.gpu.torch_operations import OPERATIONS
from worker_svc.sampling.candidates import CandidateRanker
from worker_svc.sampling.prompt_logprobs import FetchedPrompts, PromptSpan, launch_prompts, pack_prompts
from worker_svc.sampling.sampler import Sampler
from worker_svc.sampling.sampling_columns import SamplingColumns
from worker_svc.sampling.to_host import to_host
from worker_svc.steps.step_upload import StepUpload

torch.set_num_threads(1)  # on contended cores two threads mostly wait for each other

CPU = torch.device("cpu")
NONE = np.zeros(0, dtype=np.int64)


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_of_samples_is_the_hosts(seed: int) -> None:
    case = random_case(OPERATIONS, seed, count=random.Random(seed).choice([1, 3, 20]))
    assert_same_samples(case.sampled_on_device(), case.sampled_on_host())


@pytest.mark.parametrize("seed", range(25))
def test_any_mix_of_candidates_is_the_hosts(seed: int) -> None:
    case = random_case(OPERATIONS, 1000 + seed, count=random.Random(seed).choice([1, 3, 12]))
    generator = random.Random(seed)
    counts = [generator.randint(1, case.vocab_size) for _ in case.samplings]
    assert_same_candidates(case.ranked_on_device(counts), case.ranked_on_host(counts))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_spoils_its_own_samples_alone(bad: float) -> None:
    for seed in range(8):
        case = random_case(OPERATIONS, 2000 + seed, count=9)
        case.logits = spoil(case.logits, int(case.logit_rows[0]), bad)
        found = case.sampled_on_device()
        assert 0 in found.invalid_samples
        assert_same_samples(found, case.sampled_on_host())
        counts = [1] * 9
        assert_same_candidates(case.ranked_on_device(counts), case.ranked_on_host(counts))
        assert case.ranked_on_device(counts).candidates[0].token_ids == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_as_their_float32_values(dtype: torch.dtype) -> None:
    case = random_case(OPERATIONS, 5, count=20)
    half = case.logits.to(dtype)
    case.logits = half.float()
    expected = case.sampled_on_device()
    counts = [1] * 20
    ranked = case.ranked_on_device(counts)
    case.logits = half
    assert_same_samples(case.sampled_on_device(), expected)
    assert_same_candidates(case.ranked_on_device(counts), ranked)
    assert case.logits is half and torch.equal(half, case.logits)


def test_a_sample_whose_tokens_are_all_barred_is_not_valid() -> None:
    barred = SequenceSampling(seed=1, allowed_token_ids=(4,), suppressed_token_ids=(4,), suppressed_until=10**6)
    case = SamplingCase(OPERATIONS, [barred, SequenceSampling(seed=1), barred], seed=0)
    found = case.sampled_on_device()
    assert found.invalid_samples == [0, 2]
    assert found.token_ids[0] == found.token_ids[2] == 0
    assert_same_samples(found, case.sampled_on_host())


def test_a_token_that_only_the_device_knows_is_penalised() -> None:
    greedy = SequenceSampling(seed=1, temperature=0.0, presence_penalty=10.0)
    case = SamplingCase(OPERATIONS, [greedy], seed=3)
    case.num_prompt[0] = case.columns.num_prompt_tokens[case.seats[0]] = 0
    (best,) = case.sampled_on_device().token_ids
    case.tokens[int(case.seats[0]), int(case.positions[0]) - 1] = best
    assert case.sampled_on_device().token_ids != [best]


def test_what_no_sample_asks_for_is_not_packed() -> None:
    case = SamplingCase(OPERATIONS, [SequenceSampling(seed=1, temperature=0.0)] * 3, seed=1)
    later = SequenceSampling(seed=2, suppressed_token_ids=(3,), suppressed_until=1)
    case.columns.place(int(case.seats[1]), later, 0)
    sampler = Sampler(case.columns, OPERATIONS.sampling)
    case.upload.begin()
    packed = sampler.pack(case.upload, case.seats[[0, 2]], case.positions[[0, 2]], case.logit_rows[[0, 2]])
    assert packed is not None
    assert packed.rows.all_greedy and len(packed.rows.selecting) == 0
    assert packed.edits is None and packed.logprobs is None
    packed = sampler.pack(case.upload, case.seats, np.full(3, 1), case.logit_rows)
    assert packed is not None
    assert packed.edits is None  # from its position on, the second suppresses nothing
    assert not packed.rows.all_greedy


def test_a_warm_up_changes_nothing() -> None:
    case = random_case(OPERATIONS, 3, count=20)
    logits, tokens, expected = case.logits.clone(), case.tokens.clone(), case.sampled_on_device()
    sampler = Sampler(case.columns, OPERATIONS.sampling)
    sampler.warm_up(case.logits, case.tokens)
    assert torch.equal(case.logits, logits) and torch.equal(case.tokens, tokens)
    assert_same_samples(case.sampled_on_device(), expected)


def test_no_samples_and_no_candidates_are_nothing() -> None:
    columns, upload = SamplingColumns(2, 10), StepUpload(CPU, {}, 64)
    upload.begin()
    assert Sampler(columns, OPERATIONS.sampling).pack(upload, NONE, NONE, NONE) is None
    assert CandidateRanker(columns, OPERATIONS.sampling).pack(upload, NONE, NONE, NONE, NONE) is None
    assert pack_prompts(upload, []) is None


def test_prompt_logprobs_in_slices_are_those_at_once() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(11, 8, generator=generator), torch.randn(8, 77, generator=generator)
    rows = torch.arange(11).numpy()
    ids = torch.randint(0, 77, (11,), generator=generator).numpy()
    spans = [PromptSpan(3, 1, ids[:4], rows[:4], 2), PromptSpan(1, 5, ids[4:], rows[4:], 90)]
    upload = StepUpload(CPU, {}, 256)
    upload.begin()
    packed = pack_prompts(upload, spans)
    assert packed is not None
    upload.send()
    sizes: list[int] = []

    def head(some: Tensor) -> Tensor:
        sizes.append(len(some))
        return some @ weight

    result = empty_result()
    launch_prompts(head, hidden, packed, 4, OPERATIONS.sampling).fill_result(result)
    assert sizes == [4, 4, 3]
    expected = empty_result()
    FetchedPrompts(spans, token_logprobs(hidden @ weight, torch.from_numpy(ids)[:, None], 90)).fill_result(expected)
    for found, other in zip(result.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert (found.seat, found.position) == (other.seat, other.position)
        assert dataclasses.is_dataclass(found.rows)
        assert_same_rows(found.rows, other.rows)
    assert result.prompt_logprobs[1].rows.num_top == 77


def test_a_copy_to_the_host_does_not_change_with_what_was_copied() -> None:
    tensor = torch.arange(4)
    copy = to_host(tensor)
    tensor += 1
    assert copy.tolist() == [0, 1, 2, 3]
