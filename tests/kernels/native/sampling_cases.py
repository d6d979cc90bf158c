"""Rows of logits of all kinds, and samples with all kinds of parameters, for the operations of a CPU."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.choice_reference import SampleRows
from kernels.sampling.logit_edits import LogitEdits, TokenMasks, TokenPairs
from kernels.sampling.noise import row_keys
from kernels.sampling.penalty_reference import PenaltyRows
from kernels.sampling.sampling import min_p_thresholds

NUM_SEATS, WIDTH = 7, 150
LOGIT_KINDS = ("normal", "flat", "peaked", "rounded", "equal", "small", "huge")


def random_logits(kind: str, num_rows: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Float32, all finite."""
    normal = torch.randn(num_rows, vocab_size, generator=generator)
    match kind:
        case "flat":
            return normal * 0.01 + 3
        case "peaked":
            return normal * 12
        case "rounded":
            return (normal * 2).round()
        case "equal":
            return torch.full((num_rows, vocab_size), -1.5)
        case "small":
            return normal * 1e-40
        case "huge":
            return normal * 5e37
    return normal * 3


@dataclass(frozen=True)
class Parameters:
    """Parameters of one sample."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    position: int = 0


def sample_rows(parameters: list[Parameters], logit_rows: list[int], vocab_size: int) -> SampleRows:
    temperatures = torch.tensor([each.temperature for each in parameters])
    top_k = torch.tensor([min(each.top_k or vocab_size, vocab_size) for each in parameters], dtype=torch.int32)
    top_p = torch.tensor([each.top_p for each in parameters], dtype=torch.float64)
    selects = (temperatures != 0) & ((top_k < vocab_size) | (top_p < 1))
    return SampleRows(
        logit_rows=torch.tensor(logit_rows, dtype=torch.int32),
        temperatures=temperatures,
        floors=min_p_thresholds(torch.tensor([each.min_p for each in parameters], dtype=torch.float64)),
        top_k=top_k,
        top_p=top_p,
        keys=row_keys(
            [each.seed for each in parameters], [0] * len(parameters), [each.position for each in parameters]
        ),
        selecting=selects.nonzero()[:, 0].int(),
        all_greedy=not bool(temperatures.any()),
    )


def one_of(rows: SampleRows, i: int) -> SampleRows:
    """The sample i alone."""
    columns = {
        field.name: getattr(rows, field.name)[i : i + 1]
        for field in dataclasses.fields(rows)
        if field.name not in ("selecting", "all_greedy")
    }
    is_selecting = bool((rows.selecting == i).any())
    selecting = torch.zeros(int(is_selecting), dtype=torch.int32)
    return SampleRows(**columns, selecting=selecting, all_greedy=bool(rows.temperatures[i] == 0))


def random_edits(num_rows: int, vocab_size: int, generator: torch.Generator) -> tuple[LogitEdits, Tensor]:
    """Edits of about half of the rows by each kind, and the token table of their histories."""

    def some_rows() -> list[int]:
        return torch.rand(num_rows, generator=generator).lt(0.5).nonzero()[:, 0].tolist()

    def pairs(most: int) -> TokenPairs | None:
        rows, ids = [], []
        for row in some_rows():
            chosen = torch.randperm(vocab_size, generator=generator)[: 1 + row % most]
            ids.append(chosen)
            rows.append(torch.full_like(chosen, row))
        return TokenPairs(torch.cat(rows), torch.cat(ids)) if rows else None

    def masks() -> TokenMasks | None:
        rows = some_rows()
        words = torch.randint(-(2**31), 2**31, (len(rows), -(-vocab_size // 32)), generator=generator)
        plain = torch.rand(words.shape, generator=generator)  # most words of a mask have no bit, or all
        words = words.masked_fill(plain < 0.4, 0).masked_fill(plain > 0.8, -1).int()
        return TokenMasks(torch.tensor(rows), words) if rows else None

    biased = pairs(5)
    num_biased = 0 if biased is None else len(biased.rows)
    penalised = some_rows()
    lengths = torch.randint(0, WIDTH + 1, (len(penalised),), generator=generator, dtype=torch.int32)
    penalties = PenaltyRows(
        logit_rows=torch.tensor(penalised, dtype=torch.int32),
        seats=torch.randint(0, NUM_SEATS, (len(penalised),), generator=generator, dtype=torch.int32),
        lengths=lengths,
        num_prompt=(lengths * torch.rand(len(penalised), generator=generator)).int(),
        penalties=torch.rand(len(penalised), 3, generator=generator) * 2 + 0.1,
        max_length=int(lengths.max()) if penalised else 0,
    )
    table = torch.randint(0, vocab_size, (NUM_SEATS, WIDTH), generator=generator, dtype=torch.int32)
    edits = LogitEdits(
        allowed=pairs(40),
        suppressed=pairs(3),
        biased=biased,
        biases=None if biased is None else torch.randn(num_biased, generator=generator) * 3,
        penalties=penalties if penalised else None,
        masks=masks(),
    )
    return edits, table
