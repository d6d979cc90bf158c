"""Compare clients' histories with an undisturbed run of the same requests: lost, duplicated, missing, changed.

Samples, tokens, log-probabilities, texts and reasons of ends are equal. An output may part from its reference only at a
near tie, as `tests.equality` defines it: then what is behind is not compared, but has its length. Margins are computed
by `transformers`, and only where outputs differ. Knows no process.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM

import quire
from tests.chaos.asks import ChaosAsk
from tests.chaos.history import Told
from tests.e2e.pressure_load import Margins
from tests.equality import NEAR_TIE
from tests.services import DEMO_MODEL

LOGPROB_TOLERANCE = 1e-4
MAX_REASONS = 20


class MarginSource(Protocol):
    """Source of the model's margins, which tell near ties."""

    def of_sample(self, ask: ChaosAsk, index: int, output: Sequence[int]) -> list[float]: ...

    def of_search(self, ask: ChaosAsk) -> float: ...


class DemoMargins:
    """The demo model in `transformers`, loaded when it is first asked."""

    def __init__(self) -> None:
        self._margins: Margins | None = None

    def of_sample(self, ask: ChaosAsk, index: int, output: Sequence[int]) -> list[float]:
        return self._loaded().of_sample(ask, index, output)

    def of_search(self, ask: ChaosAsk) -> float:
        return self._loaded().of_search(ask)

    def _loaded(self) -> Margins:
        if self._margins is None:
            torch.set_num_threads(1)
            model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
            self._margins = Margins(model)
        return self._margins


@dataclass(slots=True)
class Verdict:
    """Counts over the histories of a scenario. Each but the first two should be zero; cuts must be rare."""

    sent: int = 0
    accepted: int = 0
    lost: int = 0  # accepted, and did not finish for their client
    duplicated: int = 0  # positions that came twice
    missing: int = 0  # positions that never came
    changed: int = 0  # positions with another token or log-probability than undisturbed, texts, ends
    num_tokens: int = 0
    num_cuts: int = 0  # requests that part from the reference at a near tie
    worst_stall_s: float = 0.0  # between two tokens of a request
    reasons: list[str] = field(default_factory=list)

    def note(self, reason: str) -> None:
        if len(self.reasons) < MAX_REASONS:
            self.reasons.append(reason)


@dataclass(frozen=True, slots=True)
class Reference:
    """The outputs of an undisturbed run, by ask."""

    asks: list[ChaosAsk]
    completions: list[quire.Completion]
    margins: MarginSource

    def judge(self, requests: Iterable[Told]) -> Verdict:
        """Judge all requests."""
        verdict = Verdict()
        for told in requests:
            verdict.sent += 1
            verdict.num_tokens += told.num_tokens
            verdict.accepted += told.accepted_s is not None
            if self.asks[told.ask].streams:
                verdict.worst_stall_s = max(verdict.worst_stall_s, _worst_stall(told))
            _check_positions(told, verdict)
            finished = told.state == "finished"
            if not finished and told.accepted_s is not None:
                verdict.lost += 1
                verdict.note(f"{told.request_id} lost: {told.state}: {told.error}")
            self._compare(told, verdict, is_whole=finished)
        return verdict

    def _compare(self, told: Told, verdict: Verdict, *, is_whole: bool) -> None:
        ask, reference = self.asks[told.ask], self.completions[told.ask]
        is_cut = False
        for sample in reference.samples:
            found = told.tokens_of(sample.index)
            length = len(sample.token_ids) if is_whole else len(found)
            differing = _first_difference(sample.token_ids, found, length)
            if differing is None:
                _check_text_and_end(told, sample, verdict, is_whole=is_whole)
            elif self._may_part(ask, reference, sample, found, differing):
                is_cut = True
                if is_whole:
                    _check_end_of_cut(told, ask, sample.index, verdict)
            else:
                wrong = sum(a != b for a, b in zip(sample.token_ids, found, strict=False))
                verdict.changed += wrong + max(0, len(found) - len(sample.token_ids))
                verdict.missing += max(0, length - len(found))
                verdict.note(f"{told.request_id} sample {sample.index} differs at position {differing}")
                _check_text_and_end(told, sample, verdict, is_whole=is_whole)
            if differing is None or ask.streams:  # a search that parts has other log-probabilities from the start
                _check_logprobs(told, sample, verdict, len(found) if differing is None else differing)
        _check_no_more_samples(told, reference, verdict)
        verdict.num_cuts += is_cut

    def _may_part(
        self, ask: ChaosAsk, reference: quire.Completion, sample: quire.Sample, found: Sequence[int], position: int
    ) -> bool:
        """True if a near tie explains that an output parts from its reference at a position.

        Tokens before it are equal, so an earlier near tie explains nothing; beams and ranks hang on all samples.
        """
        if not found:
            return False
        if ask.beam_width is not None:
            return self.margins.of_search(ask) < NEAR_TIE
        if ask.best_of is not None:
            margins = (self.margins.of_sample(ask, each.sample_index, each.token_ids) for each in reference.samples)
            return any(abs(margin) < NEAR_TIE for each in margins for margin in each)
        if position >= min(len(found), len(sample.token_ids)):
            return False  # it is cut short, or too long
        return abs(self.margins.of_sample(ask, sample.sample_index, sample.token_ids)[position]) < NEAR_TIE


def _check_text_and_end(told: Told, sample: quire.Sample, verdict: Verdict, *, is_whole: bool) -> None:
    """Check text and end against the reference; of an output that broke off, as far as they came."""
    text, finishes, expected = told.text_of(sample.index), told.finishes_of(sample.index), sample.finish_reason.value
    if not (text == sample.text if is_whole else sample.text.startswith(text)):
        verdict.changed += 1
        verdict.note(f"{told.request_id} sample {sample.index}: other text")
    if not (finishes == {expected} if is_whole else finishes <= {expected}):
        verdict.changed += 1
        verdict.note(f"{told.request_id} sample {sample.index} ends with {sorted(finishes)}, not {expected}")


def _check_end_of_cut(told: Told, ask: ChaosAsk, index: int, verdict: Verdict) -> None:
    """Check that a whole output that parted from its reference has its length, and an end that it may have."""
    length, finishes = len(told.tokens_of(index)), told.finishes_of(index)
    may_stop = ask.beam_width is not None or bool(ask.stop)  # others ignore the end of a sequence
    ends_early = may_stop and finishes == {quire.FinishReason.STOP.value}
    if not ends_early and finishes != {quire.FinishReason.LENGTH.value}:
        verdict.changed += 1
        verdict.note(f"{told.request_id} sample {index}, cut at a near tie, ends with {sorted(finishes)}")
    verdict.changed += max(0, length - ask.max_tokens)
    if length > ask.max_tokens or (length < ask.max_tokens and not ends_early):
        verdict.missing += max(0, ask.max_tokens - length)
        verdict.note(f"{told.request_id} sample {index}, cut at a near tie, has {length} tokens")


def _check_logprobs(told: Told, sample: quire.Sample, verdict: Verdict, length: int) -> None:
    wrong = _wrong_logprobs(told, sample, length)
    verdict.changed += wrong
    if wrong:
        verdict.note(f"{told.request_id} sample {sample.index}: {wrong} other log-probabilities")


def _check_no_more_samples(told: Told, reference: quire.Completion, verdict: Verdict) -> None:
    for index in {piece.sample for piece in told.pieces} - {sample.index for sample in reference.samples}:
        verdict.changed += max(1, len(told.tokens_of(index)))
        verdict.note(f"{told.request_id} has a sample {index} that nobody asked for")


async def differing_records(client: quire.AsyncClient, requests: Iterable[Told], reasons: list[str]) -> int:
    """Positions at which the server's record of a finished request is not what its client was told; texts, ends."""
    num_differing = 0
    for told in requests:
        if told.state != "finished":
            continue
        try:
            record = await client.get(told.request_id)
        except quire.NotFoundError:
            num_differing += told.num_tokens
            reasons.append(f"{told.request_id} has no record")
            continue
        kept = {sample.index: sample for sample in record.samples}
        for index in sorted(kept.keys() | {piece.sample for piece in told.pieces}):
            differing = _num_differing(told, index, kept.get(index))
            if differing:
                reasons.append(f"{told.request_id} sample {index}: record and told output differ")
            num_differing += differing
    return num_differing


def _num_differing(told: Told, index: int, kept: quire.SampleOutput | None) -> int:
    mine = told.tokens_of(index)
    if kept is None:
        return max(1, len(mine))
    differing = sum(a != b for a, b in zip(mine, kept.token_ids, strict=False)) + abs(len(mine) - len(kept.token_ids))
    ends = {kept.finish.reason.value} if kept.finish is not None else set()
    return differing + (told.text_of(index) != kept.text) + (told.finishes_of(index) != ends)


def _check_positions(told: Told, verdict: Verdict) -> None:
    """Check that each position came once, in order."""
    due: dict[int, int] = {}
    for piece in told.pieces:
        expected = due.get(piece.sample, 0)
        twice, gap = max(0, expected - piece.position), max(0, piece.position - expected)
        verdict.duplicated += min(twice, len(piece.tokens))
        verdict.missing += gap
        if twice or gap:
            verdict.note(f"{told.request_id} sample {piece.sample}: position {piece.position} where {expected} was due")
        due[piece.sample] = max(expected, piece.position + len(piece.tokens))


def _first_difference(reference: Sequence[int], found: Sequence[int], length: int) -> int | None:
    for position in range(max(length, len(found))):
        expected = reference[position] if position < len(reference) else None
        if expected is None or position >= len(found) or found[position] != expected:
            return position
    return None


def _wrong_logprobs(told: Told, sample: quire.Sample, length: int) -> int:
    """Count the first `length` tokens whose log-probability differs from the reference."""
    if not sample.logprobs:
        return 0
    found = [each for piece in told.pieces if piece.sample == sample.index for each in piece.logprobs]
    pairs = zip(found[:length], sample.logprobs[:length], strict=False)
    wrong = sum(not abs(mine - theirs.logprob) <= LOGPROB_TOLERANCE for mine, theirs in pairs)  # no number is none
    return wrong + max(0, length - len(found))


def _worst_stall(told: Told) -> float:
    moments = [piece.at_s for piece in told.pieces if piece.tokens]
    return max((b - a for a, b in pairwise(moments)), default=0.0)
