"""The sampler over mixed batches: each seat gets what it would get alone, and bad rows harm no other."""

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.sampling_params import SequenceSampling
from tests.worker.reference_edits import TokenHistory
from tests.worker.sampling_by_seats import BUNDLES, Samples, sample_seats

torch.set_num_threads(1)  # on contended cores two threads mostly wait for each other

VOCAB_SIZE = 5003  # no multiple of anything
HISTORY = TokenHistory([5, 9, 9, 70, 5000, 9, 70, 1], num_prompt_tokens=4)
KINDS = [
    SequenceSampling(seed=1, temperature=0.0),
    SequenceSampling(seed=2, num_logprobs=5),
    SequenceSampling(seed=3, temperature=0.4, top_k=40, num_logprobs=0),
    SequenceSampling(seed=4, temperature=1.9, top_p=0.95, num_logprobs=20),
    SequenceSampling(seed=5, min_p=0.1, num_logprobs=1),
    SequenceSampling(seed=6, temperature=1.3, top_k=500, top_p=0.7, min_p=0.001, num_logprobs=3),
    SequenceSampling(seed=7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.2, num_logprobs=2),
    SequenceSampling(seed=8, temperature=0.0, frequency_penalty=2.0, num_logprobs=2),
    SequenceSampling(seed=9, logit_bias=((17, 6.0), (18, 6.0), (17, 1.0)), num_logprobs=2),
    SequenceSampling(seed=10, temperature=2.0, allowed_token_ids=tuple(range(0, 5000, 7)), top_p=0.5, num_logprobs=0),
    SequenceSampling(seed=11, suppressed_token_ids=(2, 3), suppressed_until=10_000, num_logprobs=4),
]


def random_logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2.5


Sample = Callable[[Tensor, list[SequenceSampling], list[int]], Samples]


@pytest.fixture(params=BUNDLES)
def sample(request: pytest.FixtureRequest) -> Sample:
    def sample_with(logits: Tensor, seats: list[SequenceSampling], positions: list[int]) -> Samples:
        histories = [HISTORY if seat.needs_history else None for seat in seats]
        return sample_seats(request.param, logits, seats, positions, histories)

    return sample_with


def result_of(output: Samples, row: int) -> tuple[object, ...]:
    """Result of one row as plain values, which are equal only if every bit is."""
    logprobs = output.logprobs[row]
    return (int(output.token_ids[row]), bool(output.valid[row]), logprobs)


@pytest.mark.parametrize("num_neighbours", [6, 63])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_seat_gets_the_same_alone_and_among_any_neighbours(sample: Sample, kind: int, num_neighbours: int) -> None:
    own = random_logits(1, seed=kind)
    alone = result_of(sample(own, [KINDS[kind]], [77]), 0)
    generator = random.Random(kind)
    seats = [dataclasses.replace(generator.choice(KINDS), seed=i) for i in range(num_neighbours)]
    positions = [generator.randrange(2000) for _ in seats]
    place = generator.randrange(num_neighbours)
    seats.insert(place, KINDS[kind])
    positions.insert(place, 77)
    logits = random_logits(num_neighbours + 1, seed=100)
    logits[(place + 1) % len(seats), 3] = math.nan
    logits[place] = own[0]
    assert result_of(sample(logits, seats, positions), place) == alone
    assert alone[1] is True


def test_plain_greedy_takes_the_lowest_of_equal_maxima(sample: Sample) -> None:
    logits = torch.zeros(3, 10)
    logits[1, [4, 8]] = 1.0
    output = sample(logits, [SequenceSampling(seed=i, temperature=0.0) for i in range(3)], [0, 0, 0])
    assert output.token_ids.tolist() == [0, 4, 0]
    assert output.token_ids.dtype == torch.int64
    assert output.logprobs == (None, None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_reported_and_disturbs_no_other(
    sample: Sample, bad: float, temperature: float
) -> None:
    seats = [dataclasses.replace(seat, temperature=temperature) for seat in KINDS]
    positions = list(range(len(seats)))
    logits = random_logits(len(seats), seed=3)
    clean = sample(logits, seats, positions)
    for row in range(len(seats)):
        spoiled = logits.clone()
        spoiled[row, 1234] = bad
        output = sample(spoiled, seats, positions)
        assert output.valid.tolist() == [i != row for i in range(len(seats))]
        assert int(output.token_ids[row]) == 0
        others = [i for i in range(len(seats)) if i != row]
        assert [result_of(output, i) for i in others] == [result_of(clean, i) for i in others]


def test_a_row_whose_tokens_are_all_barred_is_not_valid(sample: Sample) -> None:
    seat = SequenceSampling(seed=1, allowed_token_ids=(4,), suppressed_token_ids=(4,), suppressed_until=3)
    output = sample(random_logits(2, seed=0), [seat, seat], [2, 3])
    assert output.valid.tolist() == [False, True]
    assert int(output.token_ids[1]) == 4


def test_ids_are_suppressed_below_their_position_only(sample: Sample) -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 50] = 30.0
    seat = SequenceSampling(seed=1, temperature=0.0, suppressed_token_ids=(50,), suppressed_until=8)
    assert sample(logits, [seat, seat], [7, 8]).token_ids.tolist() == [0, 50]


def test_the_logits_are_not_changed(sample: Sample) -> None:
    logits = random_logits(len(KINDS), seed=1)
    before = logits.clone()
    sample(logits, KINDS, [5] * len(KINDS))
    assert torch.equal(logits, before)


def test_logprobs_ignore_every_parameter(sample: Sample) -> None:
    logits = random_logits(1, seed=2)
    expected = logits[0].double().log_softmax(-1)
    for seat in KINDS:
        seat = dataclasses.replace(seat, num_logprobs=3)
        output = sample(logits, [seat], [12])
        rows = output.logprobs[0]
        assert rows is not None
        token = int(output.token_ids[0])
        assert list(rows.logprobs) == pytest.approx([float(expected[token])], abs=2e-5)
        assert rows.ranks == [1 + int((logits[0] > logits[0, token]).sum())]
        assert rows.top_token_ids == logits[0].topk(3).indices.tolist()


@pytest.mark.parametrize("bundle", BUNDLES)
def test_penalties_tell_prompt_from_output(bundle: str) -> None:
    logits = torch.zeros(2, 8)
    seat = SequenceSampling(seed=0, temperature=0.0, presence_penalty=1.0)
    tokens = [0, 1, 2, 2]
    histories = [TokenHistory(tokens, 2), TokenHistory(tokens, 0)]
    # The first row penalises token 2 alone, the second tokens 0 to 2.
    assert sample_seats(bundle, logits, [seat, seat], [4, 4], histories).token_ids.tolist() == [0, 3]


def test_samples_of_one_row_differ_by_their_index(sample: Sample) -> None:
    logits = random_logits(1, seed=4).expand(16, -1)
    seats = [SequenceSampling(seed=3, sample_index=i) for i in range(16)]
    tokens = sample(logits, seats, [9] * 16).token_ids
    assert len(set(tokens.tolist())) > 8
    assert torch.equal(tokens, sample(logits, seats, [9] * 16).token_ids)


def test_half_precision_logits_are_sampled_as_their_float32_values(sample: Sample) -> None:
    logits = random_logits(len(KINDS), seed=6).to(torch.bfloat16)
    positions = [3] * len(KINDS)
    half, full = sample(logits, KINDS, positions), sample(logits.float(), KINDS, positions)
    assert [result_of(half, i) for i in range(len(KINDS))] == [result_of(full, i) for i in range(len(KINDS))]


def test_a_step_without_samples_gives_an_empty_output(sample: Sample) -> None:
    output = sample(torch.empty(0, VOCAB_SIZE), [], [])
    assert output.token_ids.shape == output.valid.shape == (0,)
    assert output.logprobs == ()
