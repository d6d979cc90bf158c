"""Tokens chosen by the kernels, one by one the reference's, whatever samples stand beside each other."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kernels.sampling import choice_reference
from kernels.sampling.choice_reference import ChosenTokens, SampleRows
from kernels.sampling.noise import gumbel, noise_bits, row_keys
from kernels.sampling.sampling import min_p_thresholds, scale, truncation_thresholds
from kernels.sampling.token_choice import TILE, choose_tokens, split
from kernels.sampling.token_selection import MOST_PARTS, SELECT_TILE, selection_parts, survival_thresholds
from tests.kernels.on_device.devices import DEVICE, DTYPES

OFF = 1 << 30  # top-k
# Temperature, min-p, top-k, top-p.
KINDS = [
    (0.0, 0.0, OFF, 1.0),
    (1.0, 0.0, OFF, 1.0),
    (0.7, 0.0, 40, 1.0),
    (1.5, 0.0, OFF, 0.9),
    (1.2, 0.001, 30, 0.8),
    (1.0, 0.2, OFF, 1.0),
    (1.0, 0.2, 3, 0.5),
    (0.0, 0.0, 5, 0.5),
    (2.0, 1.0, OFF, 0.3),
    (3.0, 0.0, 1, 1.0),
    (1.0, 0.0, OFF, 1e-9),
    (1.0, 0.0, 9, 0.999999),
    (1e-30, 0.0, 7, 0.9),
    (1e30, 0.0, OFF, 0.5),
    (1e30, 0.0, 4, 1.0),
]
PLAIN = [KINDS[0], KINDS[1], KINDS[5]]


def sample_rows(kinds: list[tuple[float, float, int, float]], logit_rows: list[int], vocab_size: int) -> SampleRows:
    temperatures, min_p, top_k, top_p = (torch.tensor(column) for column in zip(*kinds, strict=True))
    top_k = top_k.clamp(max=vocab_size)
    selects = (temperatures != 0) & ((top_k < vocab_size) | (top_p < 1))
    rows = SampleRows(
        logit_rows=torch.tensor(logit_rows, dtype=torch.int32),
        temperatures=temperatures.float(),
        floors=min_p_thresholds(min_p.double()),
        top_k=top_k.int(),
        top_p=torch.tensor([kind[3] for kind in kinds], dtype=torch.float64),
        keys=row_keys(list(range(len(kinds))), [0] * len(kinds), [17] * len(kinds)),
        selecting=selects.nonzero()[:, 0].int(),
        all_greedy=not temperatures.any(),
    )
    return on_device(rows)


def on_device(rows: SampleRows) -> SampleRows:
    tensors = {f.name: getattr(rows, f.name).to(DEVICE) for f in dataclasses.fields(rows) if f.name != "all_greedy"}
    return dataclasses.replace(rows, **tensors)


def random_logits(rows: int, vocab_size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.to(DEVICE, dtype)


def check(logits: Tensor, rows: SampleRows, edited: Tensor | None = None) -> ChosenTokens:
    found, expected = choose_tokens(logits, rows, edited), choice_reference.choose_tokens(logits, rows, edited)
    assert found.token_ids.dtype == torch.int32
    assert found.valid.tolist() == expected.valid.tolist()
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    return found


@pytest.mark.parametrize("vocab_size", [1, 1000])
def test_any_mix_of_samples_gets_the_references_tokens(vocab_size: int) -> None:
    rows = sample_rows(KINDS, [i % 3 for i in range(len(KINDS))], vocab_size)
    assert bool(check(random_logits(3, vocab_size, seed=vocab_size), rows).valid.all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_survive_together_and_the_lowest_id_wins(dtype: torch.dtype) -> None:
    kinds = [*KINDS[:5], KINDS[11]]
    logits = random_logits(2, 300, seed=1, dtype=dtype).round()
    logits[1] = 0.0
    check(logits, sample_rows(kinds + kinds, [0] * 6 + [1] * 6, 300))


@pytest.mark.parametrize("vocab_size", [TILE, 2 * TILE - 1, 4 * TILE + 1])
def test_a_row_in_parts_gives_the_token_of_the_whole_row(vocab_size: int) -> None:
    rows = sample_rows(PLAIN, [0, 1, 1], vocab_size)
    logits = random_logits(2, vocab_size, seed=2)
    logits[0, [vocab_size - 1, vocab_size // 2]] = 99.0  # equals in two parts
    found = check(logits, rows)
    assert found.token_ids[0] == vocab_size // 2


@pytest.mark.parametrize("kind", [(1.0, 0.0, SELECT_TILE, 0.999), (1e9, 0.0, OFF, 0.7)])
def test_a_threshold_deep_in_a_row_is_found(kind: tuple[float, float, int, float]) -> None:
    vocab_size = 2 * SELECT_TILE + 3
    check(random_logits(1, vocab_size, seed=3), sample_rows([kind], [0], vocab_size))


@pytest.mark.parametrize("top_k", [OFF, 300])
def test_a_sum_that_meets_its_limit_exactly_keeps_what_the_reference_keeps(top_k: int) -> None:
    """Limits are sums of the row's own masses, and the numbers of float64 next to them."""
    logits = random_logits(1, 700, seed=10)
    logits[0, 100:130] = logits[0, 50]  # equals at some of the edges
    sums = masses_of(logits[0])[: min(top_k, 700)].cumsum(0).tolist()
    limits = [sums[i] / sums[-1] for i in (0, 1, 5, 20, 60, 150, 250)]
    top_p = [each for limit in limits for each in (limit, math.nextafter(limit, 0.0), math.nextafter(limit, 1.0))]
    rows = sample_rows([(1.0, 0.0, top_k, each) for each in top_p], [0] * len(top_p), 700)
    scaled = scale(logits.expand(len(rows), -1), rows.temperatures)
    expected = truncation_thresholds(scaled, rows.floors, rows.top_k.long(), rows.top_p, 700)
    maxima = logits.amax(1).expand(len(rows), 1).contiguous()
    assert survival_thresholds(logits, rows, maxima, indexed=True).tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 5


def test_many_samples_share_programs_that_have_several_tiles_each() -> None:
    num_samples, vocab_size = 9, 8 * SELECT_TILE + 5
    assert selection_parts(num_samples, vocab_size) == (5, 2 * SELECT_TILE)
    kinds = [(1.0 + i / 4, 0.0, (OFF, 50)[i % 2], 0.7 + i / 40) for i in range(num_samples)]
    check(random_logits(1, vocab_size, seed=11), sample_rows(kinds, [0] * num_samples, vocab_size))


def masses_of(logits: Tensor) -> Tensor:
    """Masses of the reference, int64, in descending order."""
    scaled = logits.sort(descending=True).values - logits.max()
    return (scaled.double().exp() * 2.0**40).round().long()


def test_scores_that_float32_cannot_tell_apart_are_compared_exactly() -> None:
    """Logits take back the noise, so all scores of a row are equal up to the rounding of the logits."""
    vocab_size = 40
    rows = sample_rows([(1.0, 0.0, OFF, 1.0)] * 4, [0, 1, 2, 3], vocab_size)
    noise = gumbel(noise_bits(rows.keys[:, None], torch.arange(vocab_size, dtype=torch.int32, device=DEVICE)))
    check(-noise.float(), rows)


def test_a_row_of_infinities_is_soon_done() -> None:
    logits = torch.full((1, 2 * TILE), math.inf, device=DEVICE)
    assert not check(logits, sample_rows([KINDS[1], KINDS[3]], [0, 0], 2 * TILE)).valid.any()


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    vocab_size = TILE + 3
    kinds = [KINDS[i] for i in (1, 0, 4)]
    logits = random_logits(5, vocab_size, seed=4)
    together = choose_tokens(logits, sample_rows(kinds, [4, 3, 2], vocab_size))
    for i, kind in enumerate(kinds):
        alone = sample_rows([kind], [0], vocab_size)
        alone = dataclasses.replace(alone, keys=row_keys([i], [0], [17]).to(DEVICE))
        assert choose_tokens(logits[4 - i : 5 - i], alone).token_ids.tolist() == together.token_ids[i : i + 1].tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_not_valid_and_disturbs_no_other(bad: float) -> None:
    kinds = [KINDS[i] for i in (0, 4)]
    logits = random_logits(2, 100, seed=5)
    logits[1, 70] = bad
    found = check(logits, sample_rows([*kinds, *kinds], [0, 0, 1, 1], 100))
    assert found.valid.tolist() == [True, True, False, False]
    assert found.token_ids[2:].tolist() == [0, 0]


def test_edited_logits_are_chosen_from_and_raw_ones_say_what_is_valid() -> None:
    kinds = [KINDS[i] for i in (0, 1, 4, 1, 0, 1, 2)]
    logits = random_logits(2, 90, seed=6, dtype=torch.float16)
    logits[1, 3] = math.nan
    logit_rows = [0, 0, 0, 0, 0, 1, 0]
    edited = logits.float()[logit_rows]
    edited[:4, ::2] = -math.inf
    edited[1, :89] = -math.inf
    edited[3] = -math.inf  # nothing left
    edited[4, 8] = math.inf
    edited[5] = 0.0  # an edit does not make a row finite
    found = check(logits, sample_rows(kinds, logit_rows, 90), edited)
    assert found.valid.tolist() == [True, True, True, False, False, False, True]
    assert found.token_ids[1] == 89


def test_rows_far_into_memory_are_found() -> None:
    vocab_size, stride = 50, 2**30
    memory = torch.empty(
        2 * stride + vocab_size, dtype=torch.float16, device=DEVICE
    )  # 4 GiB, of which little is touched
    logits = memory.as_strided((3, vocab_size), (stride, 1))
    logits[:] = random_logits(3, vocab_size, seed=7)
    rows = sample_rows([KINDS[0], KINDS[1], KINDS[2]], [2, 2, 2], vocab_size)
    expected = choice_reference.choose_tokens(logits.contiguous(), rows)
    assert choose_tokens(logits, rows).token_ids.tolist() == expected.token_ids.tolist()


def test_what_lies_beside_a_row_is_not_read() -> None:
    memory = torch.full((2, 130), torch.nan, device=DEVICE)
    memory[:, :101] = random_logits(2, 101, seed=8)
    assert bool(check(memory[:, :101], sample_rows(KINDS[:4], [0, 1, 0, 1], 101)).valid.all())


def test_no_samples_choose_nothing() -> None:
    rows = sample_rows(PLAIN, [0, 0, 0], 10)
    none = {f.name: getattr(rows, f.name)[:0] for f in dataclasses.fields(rows) if f.name != "all_greedy"}
    found = choose_tokens(random_logits(1, 10, seed=9), dataclasses.replace(rows, **none))
    assert found.token_ids.shape == found.valid.shape == (0,)


@pytest.mark.parametrize("num_samples", [1, 7, 256, 5000])
@pytest.mark.parametrize("vocab_size", [1, TILE, TILE + 1, 50_257, 152_064])
def test_parts_cover_a_row(num_samples: int, vocab_size: int) -> None:
    parts, part_size = split(num_samples, vocab_size)
    assert parts * part_size >= vocab_size
    assert parts & (parts - 1) == 0 and part_size % TILE == 0


@pytest.mark.parametrize("num_selecting", [1, 8, 9, 128, 256])
@pytest.mark.parametrize("vocab_size", [1, SELECT_TILE, SELECT_TILE + 1, 50_257, 65_537, 152_064])
def test_no_part_of_a_selection_is_empty(num_selecting: int, vocab_size: int) -> None:
    parts, part_size = selection_parts(num_selecting, vocab_size)
    assert parts <= MOST_PARTS and part_size % SELECT_TILE == 0
    assert (parts - 1) * part_size < vocab_size <= parts * part_size
