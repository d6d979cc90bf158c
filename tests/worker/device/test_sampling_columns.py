"""Columns gather what seats were placed with, and noise keys are those of the noise."""

import random

import numpy as np
import torch

from common.sampling_params import SequenceSampling
from kernels.sampling.noise import row_keys
from kernels.sampling.sampling import min_p_thresholds
from worker_svc.sampling.sampling_columns import Feature, SamplingColumns

VOCAB_SIZE = 100


def test_keys_are_those_of_the_noise_for_any_seed_and_position() -> None:
    generator = random.Random(1)
    seeds = [0, 2**64 - 1, 2**63, *[generator.randrange(2**64) for _ in range(50)]]
    indices = [generator.randrange(2**31) for _ in seeds]
    columns = SamplingColumns(len(seeds), VOCAB_SIZE)
    for seat, (seed, index) in enumerate(zip(seeds, indices, strict=True)):
        columns.place(seat, SequenceSampling(seed=seed, sample_index=index), 0)
    seats = np.array(generator.sample(range(len(seeds)), 40))
    positions = np.array([generator.randrange(2**20) for _ in seats])
    expected = row_keys([seeds[s] for s in seats], [indices[s] for s in seats], positions.tolist())
    assert columns.keys(seats, positions).tolist() == expected.tolist()


def test_top_k_and_top_p_select_only_where_they_are_on_and_the_seat_draws() -> None:
    columns = SamplingColumns(1, VOCAB_SIZE)
    for sampling, selects in (
        (SequenceSampling(seed=0), False),
        (SequenceSampling(seed=0, top_k=VOCAB_SIZE), False),
        (SequenceSampling(seed=0, top_k=10**6), False),
        (SequenceSampling(seed=0, top_k=VOCAB_SIZE - 1), True),
        (SequenceSampling(seed=0, top_p=0.9), True),
        (SequenceSampling(seed=0, top_p=0.9, top_k=3, temperature=0.0), False),
        (SequenceSampling(seed=0, min_p=0.5), False),
    ):
        columns.place(0, sampling, 0)
        assert bool(columns.features[0] & Feature.SELECTS) == selects
        assert 1 <= columns.top_k[0] <= VOCAB_SIZE


def test_floors_are_those_of_min_p() -> None:
    min_p = [0.0, 1e-300, 0.1, 1.0]
    columns = SamplingColumns(4, VOCAB_SIZE)
    for seat, value in enumerate(min_p):
        columns.place(seat, SequenceSampling(seed=0, min_p=value), 0)
    assert columns.floors.tolist() == min_p_thresholds(torch.tensor(min_p, dtype=torch.float64)).tolist()


def test_biases_of_one_token_add_up() -> None:
    columns = SamplingColumns(1, VOCAB_SIZE)
    columns.place(0, SequenceSampling(seed=0, logit_bias=((7, 1.5), (3, -1.0), (7, 0.25))), 0)
    ids = columns.edited_ids[0]
    assert (ids.biased.tolist(), ids.biases.tolist()) == ([7, 3], [1.75, -1.0])


def test_a_seat_placed_again_keeps_nothing() -> None:
    columns = SamplingColumns(2, VOCAB_SIZE)
    full = SequenceSampling(
        seed=9, allowed_token_ids=(1,), logit_bias=((2, 1.0),), top_k=3, presence_penalty=1.0, num_logprobs=4
    )
    columns.place(0, full, 12)
    columns.place(0, SequenceSampling(seed=1), 0)
    columns.place(1, SequenceSampling(seed=1), 0)
    assert columns.features[0] == columns.features[1] == Feature.DRAWS
    assert columns.edited_ids[0].allowed.tolist() == columns.edited_ids[0].biased.tolist() == []
    assert columns.top_k[0] == VOCAB_SIZE
    assert columns.num_prompt_tokens[0] == columns.num_logprobs[0] == 0
