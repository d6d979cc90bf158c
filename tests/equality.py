"""Meaning of "equal outputs" in this project: equal tokens up to the first near tie of the reference.

Matrix products give a row slightly different bits in different batch shapes, so two right runs may part where the
reference's best two tokens are closer than `NEAR_TIE`. Such a sequence is cut there; cuts are counted, and must be
rare.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NEAR_TIE = 1e-4  # in float32 logits
MAX_CUT_FRACTION = 0.01  # of sequences


@dataclass(frozen=True, slots=True)
class EqualityReport:
    """Report of the sequences and tokens that were compared."""

    num_sequences: int
    num_tokens: int  # compared and found equal
    num_cuts: int  # sequences that were compared only up to a near tie

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens of {self.num_sequences} sequences equal, {self.num_cuts} cut at a near tie"


def comparable_length(margins: Sequence[float], near_tie: float = NEAR_TIE) -> int:
    """Number of a sequence's tokens that count: those before its first near tie."""
    return next((position for position, margin in enumerate(margins) if margin < near_tie), len(margins))


def compare_tokens(
    reference_tokens: Sequence[Sequence[int]],
    reference_margins: Sequence[Sequence[float]],
    ours: Sequence[Sequence[int]],
) -> EqualityReport:
    """Raise AssertionError at the first token that differs before its sequence's first near tie.

    reference_margins holds, for each token of the reference, how far it was ahead of the second best: the gap of
    the top two logits, of the top two noise-perturbed logits when sampling, of the scores of beams.
    """
    assert len(reference_tokens) == len(reference_margins) == len(ours), "one output for each reference sequence"
    num_tokens = num_cuts = 0
    for index, (tokens, margins, candidate) in enumerate(zip(reference_tokens, reference_margins, ours, strict=True)):
        assert len(tokens) == len(margins), f"sequence {index}: one margin for each reference token"
        length = comparable_length(margins)
        for position in range(length):
            found = candidate[position] if position < len(candidate) else None
            assert found == tokens[position], (
                f"sequence {index} differs at position {position}: reference {tokens[position]} "
                f"(margin {margins[position]:.2e}), ours {found}"
            )
        if length == len(tokens):
            assert len(candidate) == len(tokens), f"sequence {index}: {len(candidate)} tokens, not {len(tokens)}"
        num_tokens += length
        num_cuts += length < len(tokens)
    return EqualityReport(len(reference_tokens), num_tokens, num_cuts)


def assert_equal_greedy(
    reference_tokens: Sequence[Sequence[int]],
    reference_margins: Sequence[Sequence[float]],
    ours: Sequence[Sequence[int]],
) -> EqualityReport:
    """`compare_tokens`, then print the report and require that under 1 % of the sequences were cut."""
    report = compare_tokens(reference_tokens, reference_margins, ours)
    print(report)  # noqa: T201 - each cut is counted and printed
    allowed = MAX_CUT_FRACTION * report.num_sequences
    assert report.num_cuts == 0 or report.num_cuts < allowed, f"too many near ties: {report}"
    return report
