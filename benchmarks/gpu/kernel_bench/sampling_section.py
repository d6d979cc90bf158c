"""Choosing tokens from logits: one call for a batch of 256 over a vocabulary of 128,256, for each kind of sample."""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.kernel_bench.figures import Check, Figure, Figures
from benchmarks.gpu.kernel_bench.lab import Lab
from kernels.sampling import choice_reference, token_choice
from kernels.sampling.choice_reference import SampleRows
from kernels.sampling.noise import row_keys
from kernels.sampling.sampling import min_p_thresholds

SECTION = "sampling"
BATCH, VOCAB = 256, 128256
TINY_BATCH, TINY_VOCAB = 2, 100
# Libraries round the last place of float64 exp and log differently, which may decide between two near equals.
MAX_DIFFERENT = 1


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    temperature: float
    top_k: int | None = None
    top_p: float = 1.0


KINDS = (
    _Kind("greedy", 0.0),
    _Kind("temperature 1", 1.0),
    _Kind("temperature 1, top-k 50", 1.0, top_k=50),
    _Kind("temperature 1, top-p 0.9", 1.0, top_p=0.9),
)


def measure(lab: Lab, figures: Figures) -> None:
    """Add all rows of the section."""
    batch, vocab = (TINY_BATCH, TINY_VOCAB) if lab.is_tiny else (BATCH, VOCAB)
    logits = lab.random(batch, vocab) * 4
    for kind in KINDS:
        rows = sample_rows(kind, logits)
        us = lab.clock.launch_us([lambda rows=rows: token_choice.choose_tokens(logits, rows)])  # type: ignore[misc]
        figures.add(
            Figure(
                section=SECTION,
                case=f"{batch} x {vocab}, {kind.name}",
                unit="us",
                value=us,
                us=us,
                check=_check(logits, rows),
                note=f"{logits.numel() * logits.itemsize / 1e6:.0f} MB of logits",
            )
        )


def sample_rows(kind: _Kind, logits: Tensor) -> SampleRows:
    """A sample of this kind for each row of logits."""
    batch, vocab = logits.shape
    device = logits.device
    index = torch.arange(batch, dtype=torch.int32, device=device)
    selects = kind.temperature > 0 and (kind.top_k is not None or kind.top_p < 1)
    return SampleRows(
        logit_rows=index,
        temperatures=torch.full((batch,), kind.temperature, device=device),
        floors=min_p_thresholds(torch.zeros(batch, dtype=torch.float64)).to(device),
        top_k=torch.full((batch,), min(kind.top_k or vocab, vocab), dtype=torch.int32, device=device),
        top_p=torch.full((batch,), kind.top_p, dtype=torch.float64, device=device),
        keys=row_keys([7] * batch, range(batch), [1] * batch).to(device),
        selecting=index if selects else index[:0],
        all_greedy=kind.temperature == 0,
    )


def _check(logits: Tensor, rows: SampleRows) -> Check:
    """Count the tokens that differ from the reference's."""
    chosen, expected = (module.choose_tokens(logits, rows) for module in (token_choice, choice_reference))
    different = (chosen.token_ids != expected.token_ids) | (chosen.valid != expected.valid)
    return Check(float(different.sum()), 0.0 if rows.all_greedy else float(MAX_DIFFERENT))
