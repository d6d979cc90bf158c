"""Candidates: what `transformers` would rank after its processors, row by row, whatever else is in the batch."""

import dataclasses
import math
import random
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from common.sampling_params import SequenceSampling
from common.step import Candidates
from tests.worker.reference_edits import TokenHistory
from tests.worker.sampling_by_seats import BUNDLES, SeatSamplers

torch.set_num_threads(1)  # on contended cores two threads mostly wait for each other

VOCAB_SIZE = 208  # whole vectors, so that the reference adds up a row in the same order
POSITION = 9
HISTORY = TokenHistory([5, 9, 9, 70, 200, 9, 70, 1, 5], num_prompt_tokens=4)


def rank_with(bundle: str, logits: Tensor, counts: list[int], seats: list[SequenceSampling]) -> list[Candidates]:
    histories = [HISTORY if seat.needs_history else None for seat in seats]
    return SeatSamplers(bundle, seats, [POSITION] * len(seats), histories, logits.shape[1]).rank(logits, counts)


Rank = Callable[[Tensor, list[int], list[SequenceSampling]], list[Candidates]]


@pytest.fixture(params=BUNDLES)
def rank(request: pytest.FixtureRequest) -> Rank:
    return partial(rank_with, request.param)


def reference_scores(logits: Tensor, seat: SequenceSampling) -> Tensor:
    """The scores [V] that the beam search of `transformers` ranks; what it has no processor for, written out."""
    scores = logits.log_softmax(-1)[None]
    if seat.allowed_token_ids is not None:
        barred = [token for token in range(len(logits)) if token not in seat.allowed_token_ids]
        scores = SuppressTokensLogitsProcessor(barred)(history_ids(), scores)
    processors = LogitsProcessorList()
    if seat.suppressed_token_ids and seat.suppressed_until > POSITION:
        processors.append(SuppressTokensLogitsProcessor(list(seat.suppressed_token_ids)))
    if seat.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in seat.logit_bias]))
    processors.append(RepetitionPenaltyLogitsProcessor(seat.repetition_penalty))
    scores = processors(history_ids(), scores)[0]
    for token in HISTORY.token_ids[HISTORY.num_prompt_tokens :]:
        scores[token] -= seat.frequency_penalty
    for token in set(HISTORY.token_ids[HISTORY.num_prompt_tokens :]):
        scores[token] -= seat.presence_penalty
    return scores


def history_ids() -> torch.LongTensor:
    return cast(torch.LongTensor, torch.tensor([HISTORY.token_ids]))


token_ids = st.integers(0, VOCAB_SIZE - 1)
eighths = st.integers(-16, 16).map(lambda number: number / 8)
samplings = st.builds(
    SequenceSampling,
    seed=st.just(0),
    allowed_token_ids=st.none() | st.sets(token_ids, min_size=1, max_size=40).map(lambda ids: tuple(sorted(ids))),
    suppressed_token_ids=st.lists(token_ids, max_size=5, unique=True).map(tuple),
    suppressed_until=st.sampled_from([0, POSITION, POSITION + 1, 1000]),
    logit_bias=st.dictionaries(token_ids, eighths, max_size=4).map(lambda biases: tuple(biases.items())),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 4.0]),
    presence_penalty=eighths,
    frequency_penalty=st.just(0.0) | eighths,
)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(samplings, st.integers(1, VOCAB_SIZE)), min_size=1, max_size=6),
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from(BUNDLES),
)
def test_candidates_are_those_of_transformers_in_its_order(
    asked: list[tuple[SequenceSampling, int]], seed: int, has_ties: bool, bundle: str
) -> None:
    seats, counts = [seat for seat, _ in asked], [count for _, count in asked]
    logits = torch.randn(len(seats), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    if has_ties:
        logits = logits.round()
    found = rank_with(bundle, logits, counts, seats)
    for row, (seat, count) in enumerate(asked):
        expected = reference_scores(logits[row], seat).sort(descending=True, stable=True)
        assert found[row].logprobs == pytest.approx(expected.values[:count].tolist(), abs=2e-6)
        scores = reference_scores(logits[row], seat)
        assert scores[list(found[row].token_ids)].tolist() == pytest.approx(list(found[row].logprobs), abs=2e-6)
        assert len(set(found[row].token_ids)) == count
        pairs = list(zip(found[row].logprobs, found[row].token_ids, strict=True))
        assert pairs == sorted(pairs, key=lambda pair: (-pair[0], pair[1]))  # equals by rising id
        if (
            bundle == "torch" and seat.frequency_penalty == seat.presence_penalty == 0
        ):  # nothing written out: the bits of torch
            assert found[row].token_ids == expected.indices[:count].tolist()
            assert found[row].logprobs == expected.values[:count].tolist()


KINDS = [
    SequenceSampling(seed=1),
    SequenceSampling(seed=2, num_logprobs=0),
    SequenceSampling(seed=3, num_logprobs=7, repetition_penalty=1.7),
    SequenceSampling(seed=4, allowed_token_ids=tuple(range(0, 200, 7)), num_logprobs=2),
    SequenceSampling(seed=5, suppressed_token_ids=(2, 3), suppressed_until=POSITION + 1),
    SequenceSampling(seed=6, logit_bias=((17, 6.0), (18, 6.0), (17, 1.0)), num_logprobs=300),
    SequenceSampling(seed=7, presence_penalty=0.7, frequency_penalty=-0.3),
]


def random_logits(rows: int, seed: int, vocab_size: int = 211) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2.5


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_row_is_ranked_the_same_alone_and_among_any_neighbours(rank: Rank, kind: int) -> None:
    own = random_logits(1, seed=kind)
    (alone,) = rank(own, [6], [KINDS[kind]])
    generator = random.Random(kind)
    for num_neighbours in (1, 6, 40):
        seats = [generator.choice(KINDS) for _ in range(num_neighbours)]
        counts = [generator.choice([1, 5, 211]) for _ in seats]
        place = generator.randrange(num_neighbours + 1)
        logits = random_logits(num_neighbours + 1, seed=100)
        logits[(place + 1) % len(logits), 3] = math.nan
        logits[place] = own[0]
        seats.insert(place, KINDS[kind])
        assert rank(logits, [*counts[:place], 6, *counts[place:]], seats)[place] == alone
    for count in (1, 3, 5):  # nor does it matter how many are asked for
        (fewer,) = rank(own, [count], [KINDS[kind]])
        assert fewer.token_ids == alone.token_ids[:count]
        assert fewer.logprobs == alone.logprobs[:count]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_candidates_and_disturbs_no_other(rank: Rank, bad: float) -> None:
    logits = random_logits(len(KINDS), seed=3)
    counts = [4] * len(KINDS)
    clean = rank(logits, counts, KINDS)
    for row in range(len(KINDS)):
        spoiled = logits.clone()
        spoiled[row, 123] = bad
        found = rank(spoiled, counts, KINDS)
        assert found[row] == Candidates(token_ids=(), logprobs=())
        assert [each for i, each in enumerate(found) if i != row] == [each for i, each in enumerate(clean) if i != row]


def test_what_is_barred_comes_last_at_minus_infinity(rank: Rank) -> None:
    seat = SequenceSampling(
        seed=0, allowed_token_ids=(9, 4, 7), suppressed_token_ids=(7,), suppressed_until=POSITION + 1
    )
    logits = torch.zeros(1, 12)
    logits[0, 9] = 2.0
    (found,) = rank(logits, [5], [seat])
    expected = logits[0].log_softmax(-1)
    assert found.token_ids == [9, 4, 0, 1, 2]
    assert found.logprobs == pytest.approx([float(expected[9]), float(expected[4]), *[-math.inf] * 3])


def test_a_row_whose_tokens_are_all_barred_has_nothing_but_barred_candidates(rank: Rank) -> None:
    seat = SequenceSampling(seed=0, allowed_token_ids=(4,), suppressed_token_ids=(4,), suppressed_until=POSITION + 1)
    (found,) = rank(random_logits(1, seed=0), [2], [seat])
    assert found == Candidates(token_ids=[0, 1], logprobs=[-math.inf, -math.inf])


@pytest.mark.parametrize("num_logprobs", [0, 3, 500])
def test_the_models_own_distribution_comes_beside_the_candidates_if_asked_for(rank: Rank, num_logprobs: int) -> None:
    logits = random_logits(3, seed=9)
    logits[1] = logits[1].round()  # ranks of equals are equal
    seat = SequenceSampling(
        seed=0, num_logprobs=num_logprobs, logit_bias=((8, 40.0), (9, -40.0)), repetition_penalty=3.0
    )
    plain = dataclasses.replace(seat, num_logprobs=None)
    found = rank(logits, [4, 6, 2], [plain, seat, seat])
    assert found[0].rows is None
    for row, count in ((1, 6), (2, 2)):
        rows, logprobs = found[row].rows, logits[row].double().log_softmax(-1)
        assert rows is not None
        assert found[row].token_ids[0] == 8  # by its bias: the model itself does not rank it so
        assert rows.logprobs == pytest.approx(logprobs[list(found[row].token_ids)].tolist(), abs=1e-5)
        assert rows.ranks == [1 + int((logits[row] > logits[row, token]).sum()) for token in found[row].token_ids]
        num_top = min(num_logprobs, 211)
        best = logits[row].sort(descending=True, stable=True).indices[:num_top].tolist()
        assert (rows.num_top, rows.top_token_ids) == (num_top, best * count)
        assert rows.top_logprobs == pytest.approx(logprobs[best].tolist() * count, abs=1e-5)


def test_the_logits_are_not_changed_and_half_precision_is_ranked_as_its_float32_values(rank: Rank) -> None:
    logits = random_logits(len(KINDS), seed=1).to(torch.bfloat16)
    before = logits.clone()
    counts = [9] * len(KINDS)
    assert rank(logits, counts, KINDS) == rank(logits.float(), counts, KINDS)
    assert torch.equal(logits, before)
