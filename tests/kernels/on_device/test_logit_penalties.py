"""Penalties by kernel equal the reference's and the host's own, bit by bit."""

import random

import pytest
import torch
from torch import Tensor

from kernels.sampling import penalty_reference
from kernels.sampling.logit_penalties import TILE, penalise
from kernels.sampling.penalty_reference import PenaltyRows
from tests.kernels.on_device.devices import DEVICE
from tests.kernels.penalties import apply_penalties

NUM_SEATS, WIDTH = 6, 2 * TILE + 40


def table(vocab_size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (NUM_SEATS, WIDTH), generator=generator, dtype=torch.int32).to(DEVICE)


def penalty_rows(
    histories: list[tuple[int, int, int, int]], penalties: list[tuple[float, float, float]]
) -> PenaltyRows:
    """Histories are of a row of the logits: row, seat, length, tokens of the prompt."""
    columns = torch.tensor(histories, dtype=torch.int32).T.contiguous().to(DEVICE)
    return PenaltyRows(
        logit_rows=columns[0],
        seats=columns[1],
        lengths=columns[2],
        num_prompt=columns[3],
        penalties=torch.tensor(penalties).to(DEVICE),
        max_length=int(columns[2].max()),
    )


def by_pairs(logits: Tensor, rows: PenaltyRows, tokens: Tensor) -> Tensor:
    """The host's way, from one pair for each occurrence."""
    logits = logits.clone()
    penalties = torch.zeros(len(logits), 3, device=DEVICE)
    penalties[rows.logit_rows.long()] = rows.penalties
    pairs = [
        (row, int(tokens[seat, place]), place >= num_prompt)
        for row, seat, length, num_prompt in zip(
            rows.logit_rows.tolist(), rows.seats.tolist(), rows.lengths.tolist(), rows.num_prompt.tolist(), strict=True
        )
        for place in range(length)
    ]
    columns = torch.tensor(pairs).T.to(DEVICE)
    apply_penalties(logits, columns[0], columns[1], columns[2].bool(), penalties)
    return logits


@pytest.mark.parametrize("vocab_size", [3, 50, 4001])
def test_tokens_of_histories_are_penalised_once_however_often_they_occur(vocab_size: int) -> None:
    tokens = table(vocab_size, seed=vocab_size)
    histories = [(4, 3, WIDTH, 30), (0, 1, 1, 1), (2, 5, TILE, 0), (5, 0, TILE + 1, TILE), (1, 1, 17, 16)]
    generator = random.Random(vocab_size)
    penalties = [
        (generator.choice([1.0, 0.7, 1.3]), generator.uniform(-2, 2), generator.uniform(-1, 1)) for _ in histories
    ]
    rows = penalty_rows(histories, penalties)
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 3
    logits[2, 1] = -torch.inf  # barred
    results = [logits.clone(), logits.clone()]
    penalise(results[0], rows, tokens)
    penalty_reference.penalise(results[1], rows, tokens)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], by_pairs(logits, rows, tokens))
    assert torch.equal(results[0][3], logits[3])
    assert not torch.equal(results[0][4], logits[4])


def test_a_prompt_has_no_presence_and_no_frequency() -> None:
    tokens = torch.tensor([[1, 2, 2, 3, 3, 3, 9]], dtype=torch.int32, device=DEVICE)
    logits = torch.full((1, 5), 4.0, device=DEVICE)
    logits[0, 3] = -4.0
    penalise(logits, penalty_rows([(0, 0, 6, 3)], [(2.0, 0.5, 0.25)]), tokens)
    assert logits.tolist() == [[4.0, 2.0, 2.0, -8.0 - 0.75 - 0.5, 4.0]]


def test_rows_of_wider_tensors_are_penalised_in_place() -> None:
    tokens = table(40, seed=3)[:, : TILE + 3]
    memory = torch.full((3, 64), torch.nan, device=DEVICE)
    memory[:, :40] = 1.0
    rows = penalty_rows([(2, 4, 9, 0)], [(2.0, 0.0, 0.0)])
    penalise(memory[:, :40], rows, tokens)
    expected = torch.ones(3, 40, device=DEVICE)
    penalty_reference.penalise(expected, rows, tokens)
    assert torch.equal(memory[:, :40], expected)
    assert bool(memory[:, 40:].isnan().all())


def test_empty_histories_change_nothing() -> None:
    logits = torch.ones(1, 8, device=DEVICE)
    penalise(logits, penalty_rows([(0, 0, 0, 0)], [(2.0, 1.0, 1.0)]), table(8, seed=4))
    assert logits.tolist() == [[1.0] * 8]
