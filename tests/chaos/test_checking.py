"""Verdict on what clients were told: each way in which it can be wrong is counted, and near ties excuse only theirs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import quire
from tests.chaos.asks import ChaosAsk
from tests.chaos.checking import Reference, Verdict, differing_records
from tests.chaos.history import Piece, Told
from tests.chaos.scenario import NOTHING_LOST, Figures
from tests.equality import NEAR_TIE

LENGTH = 6
SURE = 10 * NEAR_TIE
NEAR = NEAR_TIE / 10


@dataclass(slots=True)
class ToldMargins:
    """Margins as they are told: of the positions of each sample, and of a search."""

    near: dict[int, int] = field(default_factory=dict)  # by sample: the position of its near tie
    search: float = SURE

    def of_sample(self, ask: ChaosAsk, index: int, output: Sequence[int]) -> list[float]:
        return [NEAR if self.near.get(index) == position else SURE for position in range(len(output))]

    def of_search(self, ask: ChaosAsk) -> float:
        return self.search


def ask_of(num_samples: int = 1, **more: Any) -> ChaosAsk:
    return ChaosAsk(prompt=(3, 4), max_tokens=LENGTH, num_samples=num_samples, **more)


def tokens_of(index: int, length: int = LENGTH) -> list[int]:
    return [100 * index + position for position in range(length)]


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def completion_of(
    ask: ChaosAsk, *, length: int = LENGTH, reason: quire.FinishReason = quire.FinishReason.LENGTH
) -> quire.Completion:
    samples = tuple(
        quire.Sample(
            index=index,
            text=text_of(tokens_of(index, length)),
            token_ids=tuple(tokens_of(index, length)),
            finish_reason=reason,
            logprobs=tuple(quire.TokenLogprobs(token, -1.0, 1, ()) for token in tokens_of(index, length)),
            sample_index=index,
        )
        for index in range(ask.num_samples)
    )
    return quire.Completion(
        request_id="undisturbed",
        samples=samples,
        usage=quire.Usage(prompt_tokens=2, completion_tokens=length, cached_tokens=0),
        timings=quire.Timings(),
        memory=quire.RequestMemory(),
        seed=0,
    )


def piece_of(index: int, tokens: Sequence[int], **changes: Any) -> Piece:
    fields: dict[str, Any] = {
        "at_s": 1.0,
        "sample": index,
        "position": 0,
        "tokens": list(tokens),
        "logprobs": [-1.0] * len(tokens),
        "finish": "length",
        "text": text_of(tokens),
    }
    return Piece(**{**fields, **changes})


def told_of(*pieces: Piece, state: str | None = "finished") -> Told:
    return Told("one", 0, 0.0, accepted_s=0.5, pieces=list(pieces), ended_s=2.0, state=state)


def judged(
    ask: ChaosAsk, told: Told, margins: ToldMargins | None = None, completion: quire.Completion | None = None
) -> Verdict:
    return Reference([ask], [completion or completion_of(ask)], margins or ToldMargins()).judge([told])


def counts(verdict: Verdict) -> tuple[int, int, int, int]:
    return verdict.lost, verdict.missing, verdict.changed, verdict.num_cuts


def parted(index: int, position: int, length: int = LENGTH) -> list[int]:
    """Tokens that part from the reference at a position, and have nothing of it behind that."""
    return [*tokens_of(index)[:position], *(5000 + number for number in range(position, length))]


def test_what_is_as_in_the_undisturbed_run_is_right() -> None:
    ask = ask_of(4)
    verdict = judged(ask, told_of(*(piece_of(index, tokens_of(index)) for index in range(4))))
    assert counts(verdict) == (0, 0, 0, 0) and not verdict.reasons
    halves = [piece_of(0, tokens_of(0)[:2], finish=None), piece_of(0, tokens_of(0)[2:], position=2)]
    assert counts(judged(ask_of(), told_of(*halves))) == (0, 0, 0, 0)


def test_the_end_told_again_to_who_attaches_behind_it_is_no_other_text() -> None:
    end = piece_of(0, [], position=LENGTH, text="<5>")
    assert counts(judged(ask_of(), told_of(piece_of(0, tokens_of(0)), end))) == (0, 0, 0, 0)


def test_the_beginning_of_an_output_that_broke_off_is_only_lost() -> None:
    told = told_of(piece_of(0, tokens_of(0)[:3], finish=None), state="UnavailableError")
    assert counts(judged(ask_of(), told)) == (1, 0, 0, 0)


@pytest.mark.parametrize("finish", ["length", "failed", None])
def test_another_end_than_in_the_undisturbed_run_is_a_change(finish: str | None) -> None:
    ask = ask_of(stop=("?",))
    stopped = completion_of(ask, reason=quire.FinishReason.STOP)
    verdict = judged(ask, told_of(piece_of(0, tokens_of(0), finish=finish)), completion=stopped)
    assert counts(verdict) == (0, 0, 1, 0) and verdict.reasons


def test_two_ends_of_a_sample_are_a_change() -> None:
    end = piece_of(0, [], position=LENGTH, text="", finish="stop")
    assert judged(ask_of(), told_of(piece_of(0, tokens_of(0)), end)).changed == 1


@pytest.mark.parametrize("text", ["", "<0><1><2><3><4>", text_of(tokens_of(0)) + "x", text_of(tokens_of(1))])
def test_another_text_of_the_same_tokens_is_a_change(text: str) -> None:
    verdict = judged(ask_of(), told_of(piece_of(0, tokens_of(0), text=text)))
    assert counts(verdict) == (0, 0, 1, 0) and verdict.reasons


def test_another_text_before_an_output_breaks_off_is_a_change() -> None:
    told = told_of(piece_of(0, tokens_of(0)[:3], finish=None, text="<0><9>"), state="UnavailableError")
    assert judged(ask_of(), told).changed == 1


def test_log_probabilities_that_are_no_numbers_are_changes() -> None:
    told = told_of(piece_of(0, tokens_of(0), logprobs=[math.nan] * LENGTH))
    assert counts(judged(ask_of(), told)) == (0, 0, LENGTH, 0)


def test_a_sample_that_nobody_asked_for_is_a_change() -> None:
    pieces = [piece_of(index, tokens_of(index)) for index in range(5)]
    assert counts(judged(ask_of(4), told_of(*pieces))) == (0, 0, LENGTH, 0)
    assert judged(ask_of(4), told_of(*pieces[:4], piece_of(4, []))).changed == 1


def test_a_near_tie_excuses_its_own_sample_alone() -> None:
    pieces = [piece_of(0, parted(0, 3)), piece_of(1, parted(1, 0)), piece_of(2, [], finish=None)]
    verdict = judged(ask_of(4), told_of(*pieces), ToldMargins({0: 3}))
    assert verdict.num_cuts == 1
    assert verdict.missing == 2 * LENGTH  # samples 2 and 3
    assert verdict.changed >= LENGTH  # sample 1


@pytest.mark.parametrize("length", [3, LENGTH - 1])
def test_an_output_cut_short_is_missing_its_rest_also_behind_a_near_tie(length: int) -> None:
    for tokens in (parted(0, 2, length), tokens_of(0)[:length]):
        verdict = judged(ask_of(), told_of(piece_of(0, tokens)), ToldMargins({0: 2}))
        assert verdict.missing == LENGTH - length, tokens
    assert judged(ask_of(), told_of(piece_of(0, tokens_of(0)[:2])), ToldMargins({0: 2})).missing == LENGTH - 2


def test_an_output_longer_than_asked_for_is_a_change() -> None:
    for tokens in (parted(0, 2, LENGTH + 1), [*tokens_of(0), 7]):
        assert judged(ask_of(), told_of(piece_of(0, tokens)), ToldMargins({0: 2})).changed >= 1, tokens


def test_an_earlier_near_tie_excuses_no_later_difference() -> None:
    verdict = judged(ask_of(), told_of(piece_of(0, parted(0, 4))), ToldMargins({0: 1}))
    assert counts(verdict)[2:] == (LENGTH - 4 + 1, 0)  # and the text


def test_log_probabilities_before_a_near_tie_count() -> None:
    told = told_of(piece_of(0, parted(0, 3), logprobs=[-1.0, -2.0, -1.0, -9.0, -9.0, -9.0]))
    assert counts(judged(ask_of(), told, ToldMargins({0: 3}))) == (0, 0, 1, 1)


def test_behind_a_near_tie_only_a_stop_string_ends_an_output_early() -> None:
    early = piece_of(0, parted(0, 2, 4), finish="stop")
    assert counts(judged(ask_of(stop=("?",)), told_of(early), ToldMargins({0: 2}))) == (0, 0, 0, 1)
    assert judged(ask_of(), told_of(early), ToldMargins({0: 2})).changed == 1
    failed = piece_of(0, parted(0, 2), finish="failed")
    assert judged(ask_of(), told_of(failed), ToldMargins({0: 2})).changed == 1


def test_a_near_tie_of_a_search_excuses_all_its_beams_but_not_their_absence() -> None:
    ask = ask_of(2, beam_width=4)
    other = [piece_of(index, parted(index, 0, 3), finish="stop") for index in range(2)]
    assert counts(judged(ask, told_of(*other), ToldMargins(search=NEAR))) == (0, 0, 0, 1)
    assert judged(ask, told_of(*other)).changed > 0
    assert judged(ask, told_of(other[0]), ToldMargins(search=NEAR)).missing == LENGTH


def test_a_near_tie_of_ranked_samples_excuses_all_of_them() -> None:
    ask = ask_of(2, best_of=4)
    other = [piece_of(index, parted(index, 0)) for index in range(2)]
    assert counts(judged(ask, told_of(*other), ToldMargins({1: 4}))) == (0, 0, 0, 1)


def test_requests_that_were_never_accepted_and_more_than_rare_cuts_miss_a_target() -> None:
    whole = Figures(sent=400, accepted=400, lost=0, duplicated=0, missing=0, changed=0, cuts=4, leaked_blocks=0)
    assert all(target.is_met_by(whole) for target in NOTHING_LOST)
    refused = Figures(sent=3, accepted=0, lost=0, duplicated=0, missing=0, changed=0, cuts=0, leaked_blocks=0)
    assert [str(target) for target in NOTHING_LOST if not target.is_met_by(refused)] == ["refused 0"]
    assert refused.as_json()["refused"] == 3
    whole.cuts = 5
    assert [str(target) for target in NOTHING_LOST if not target.is_met_by(whole)] == ["cuts_above_1_percent 0"]
    few = Figures(sent=14, accepted=14, lost=0, duplicated=0, missing=0, changed=0, cuts=1, leaked_blocks=0)
    assert all(target.is_met_by(few) for target in NOTHING_LOST)


@dataclass(frozen=True, slots=True)
class ToldRecord:
    """Record of a request."""

    samples: tuple[quire.SampleOutput, ...]


class ToldRecords:
    """Client that knows one record."""

    def __init__(self, *samples: quire.SampleOutput) -> None:
        self._samples = samples

    async def get(self, request_id: str) -> ToldRecord:
        return ToldRecord(self._samples)


def kept_of(**changes: Any) -> quire.SampleOutput:
    fields: dict[str, Any] = {
        "index": 0,
        "text": text_of(tokens_of(0)),
        "token_ids": tuple(tokens_of(0)),
        "finish": quire.Finish(quire.FinishReason.LENGTH),
    }
    return quire.SampleOutput(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "num_differing"),
    [
        ({}, 0),
        ({"text": "other"}, 1),
        ({"finish": quire.Finish(quire.FinishReason.STOP)}, 1),
        ({"finish": None}, 1),
        ({"token_ids": (0, 1, 2, 3, 4, 9)}, 1),
    ],
)
async def test_a_record_differs_by_tokens_text_and_end(changes: dict[str, Any], num_differing: int) -> None:
    client: Any = ToldRecords(kept_of(**changes))
    reasons: list[str] = []
    found = await differing_records(client, [told_of(piece_of(0, tokens_of(0)))], reasons)
    assert (found, len(reasons)) == (num_differing, min(1, num_differing))


async def test_a_record_without_a_sample_that_was_told_differs_and_one_with_another() -> None:
    told = [told_of(*(piece_of(index, tokens_of(index)) for index in range(number))) for number in (2, 1)]
    few: Any = ToldRecords(kept_of())
    many: Any = ToldRecords(kept_of(), kept_of(index=1))
    reasons: list[str] = []
    assert await differing_records(few, told[:1], reasons) == LENGTH and reasons
    assert await differing_records(many, told[1:], reasons) >= LENGTH
