"""The rules of beam search by hand, by enumeration, and by properties over arbitrary candidates."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from scheduler_svc.core.beam_search import BeamSearch, BeamSearchParams, Candidate, Hypothesis, Survivor

EOS, EOS_2 = 0, 1
EARLY_STOPPING: tuple[bool | Literal["never"], ...] = (True, False, "never")


def params(
    beam_width: int = 2,
    num_return: int = 2,
    max_tokens: int = 10,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    num_eos: int = 1,
) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=beam_width,
        num_return=num_return,
        max_tokens=max_tokens,
        eos_token_ids=frozenset((EOS, EOS_2)[:num_eos]),
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )


def options(logprobs: Mapping[int, float]) -> list[Candidate]:
    return [Candidate(token_id, logprob) for token_id, logprob in logprobs.items()]


def advance(search: BeamSearch, *beams: Mapping[int, float]) -> list[Survivor]:
    return search.advance([options(each) for each in beams])


def test_the_best_continuations_of_all_beams_live_on() -> None:
    search = BeamSearch(params())
    assert advance(search, {5: -0.5, 6: -1.0, 7: -3.0}) == [Survivor(0, 5, -0.5), Survivor(0, 6, -1.0)]
    # -0.5 - 2.0 and -0.5 - 2.25 of the first; -1.0 - 0.25 and -1.0 - 1.75 of the second
    assert advance(search, {5: -2.0, 6: -2.25}, {8: -0.25, 9: -1.75}) == [Survivor(1, 8, -1.25), Survivor(0, 5, -2.5)]


@pytest.mark.parametrize(("beam_width", "num_eos", "num_candidates"), [(2, 0, 2), (2, 1, 3), (4, 2, 6)])
def test_a_step_needs_a_candidate_for_each_beam_and_for_each_end_token(
    beam_width: int, num_eos: int, num_candidates: int
) -> None:
    assert BeamSearch(params(beam_width, num_eos=num_eos)).num_candidates == num_candidates


def test_one_parent_may_have_all_survivors() -> None:
    search = BeamSearch(params())
    advance(search, {5: -0.5, 6: -4.0})
    assert advance(search, {7: -0.5, 8: -1.0}, {9: -0.1}) == [Survivor(0, 7, -1.0), Survivor(0, 8, -1.5)]


def test_tokens_are_copied_for_each_child_of_a_beam_but_the_last() -> None:
    """A step of a long search costs no more than of a short one, as long as each beam has one child."""
    search = BeamSearch(params())
    advance(search, {5: -0.5, 6: -1.0})
    first, second = (beam.token_ids for beam in search._live)
    advance(search, {5: -2.0}, {8: -0.25})
    assert [id(beam.token_ids) for beam in search._live] == [id(second), id(first)]
    advance(search, {7: -0.5, 9: -0.75}, {7: -9.0})
    assert [beam.token_ids is second for beam in search._live] == [False, True]
    assert search.live_outputs() == [[6, 8, 7], [6, 8, 9]]


def test_a_hypothesis_that_ends_is_scored_by_its_length_with_the_end_token() -> None:
    search = BeamSearch(params(length_penalty=2.0, early_stopping=True))
    advance(search, {5: -1.0, 6: -2.0})
    # Rank 0 ends after 2 tokens: -2.0 / 2 ** 2. The next two live on.
    assert advance(search, {EOS: -1.0, 7: -1.5}, {8: -1.0}) == [Survivor(0, 7, -2.5), Survivor(1, 8, -3.0)]
    assert advance(search, {EOS: -2.0, 9: -5.0}, {10: -9.0}) == []
    # -4.5 / 3 ** 2 equals it: the earlier one is first.
    assert search.finish() == [Hypothesis((5, EOS), -0.5, "eos"), Hypothesis((5, 7, EOS), -0.5, "eos")]


def test_an_end_token_outside_the_best_beam_width_neither_finishes_nor_lives_on() -> None:
    search = BeamSearch(params(max_tokens=2))
    assert [each.token_id for each in advance(search, {5: -1.0, 6: -2.0, EOS: -3.0})] == [5, 6]
    advance(search, {7: -1.0}, {8: -1.0})
    assert [each.token_ids for each in search.finish()] == [(5, 7), (6, 8)]


def test_at_max_tokens_the_best_beam_width_finish_whether_they_end_or_not() -> None:
    search = BeamSearch(params(max_tokens=2))
    advance(search, {5: -1.0, 6: -2.0})
    assert advance(search, {7: -0.5, EOS: -2.0}, {EOS: -0.5, 8: -1.5}) == []
    assert search.is_done
    assert search.finish() == [Hypothesis((5, 7), -0.75, "length"), Hypothesis((6, EOS), -1.25, "eos")]


def finish_two(search: BeamSearch) -> list[Survivor]:
    """Two end at once, after a first token, with -1.5 and -2.0 (halved); the best live beam has -3.0 (halved)."""
    advance(search, {5: -1.0, 6: -2.0})
    return advance(search, {EOS: -2.0, 7: -5.0}, {EOS: -2.0, 8: -4.0})


def test_early_stopping_ends_the_search_when_beam_width_hypotheses_are_finished() -> None:
    early = BeamSearch(params(early_stopping=True, length_penalty=-1.0))
    # A negative length penalty of -1 multiplies by the length: every longer beam scores less, so all three stop.
    assert finish_two(early) == []
    assert [each.score for each in early.finish()] == [-6.0, -8.0]


@pytest.mark.parametrize(("early_stopping", "num_survivors"), [(True, 0), (False, 2), ("never", 2)])
def test_a_live_beam_that_would_beat_the_worst_finished_one_goes_on_unless_the_search_stops_early(
    early_stopping: bool | Literal["never"], num_survivors: int
) -> None:
    search = BeamSearch(params(early_stopping=early_stopping))
    advance(search, {5: -1.0, EOS: -4.0, 6: -5.0})
    # Finished: -4.0 and -2.0 / 2. The best live beam has -2.5 / 2.
    assert len(advance(search, {EOS: -1.0, 7: -1.5}, {8: -1.0})) == num_survivors


def test_without_early_stopping_a_live_beam_is_judged_at_its_present_length() -> None:
    assert finish_two(BeamSearch(params(early_stopping=False))) == []  # -6.0 / 2 is worse than -4.0 / 2


def test_never_stopping_early_judges_a_live_beam_at_max_tokens() -> None:
    search = BeamSearch(params(early_stopping="never", max_tokens=4))
    assert len(finish_two(search)) == 2  # -6.0 / 4 is better than -4.0 / 2
    assert advance(search, {9: -3.0, 10: -4.0}, {11: -9.0}) == []  # -9.0 / 4 is not
    assert [each.score for each in search.finish()] == [-1.5, -2.0]


def test_never_stopping_early_without_a_length_reward_judges_at_the_present_length() -> None:
    search = BeamSearch(params(early_stopping="never", length_penalty=-1.0))
    advance(search, {5: -1.0, EOS: -4.0, 6: -5.0})
    # Finished: -2.25 * 2 and -4.0 * 1. The best live beam has -2.0 * 2 now and would have -2.0 * 10 at the end.
    assert len(advance(search, {7: -0.75, EOS: -1.25}, {8: -9.0})) == 2
    assert advance(search, {9: -1.0}, {10: -9.0}) == []  # -2.75 * 3 is worse


def test_a_live_beam_that_could_only_equal_the_worst_finished_one_ends_the_search() -> None:
    search = BeamSearch(params())
    advance(search, {5: -1.0, 6: -1.0})
    assert advance(search, {EOS: -1.0, 7: -1.0}, {EOS: -1.0, 8: -1.0}) != []  # ranks 0 and 1: one of them ended
    assert advance(search, {EOS: -1.0, 9: -2.0}, {10: -1.0}) == []  # finished -1.0 twice; the best live: -3.0 / 3


def test_equal_scores_keep_the_order_of_beams_and_then_of_candidates() -> None:
    search = BeamSearch(params(beam_width=3))
    assert [each.token_id for each in advance(search, {9: -1.0, 5: -1.0, 7: -1.0, 6: -1.0})] == [9, 5, 7]
    survivors = advance(search, {5: -2.0}, {6: -1.0}, {7: -1.0, 8: -1.0})
    assert [(each.parent, each.token_id) for each in survivors] == [(1, 6), (2, 7), (2, 8)]


def test_scores_are_added_and_divided_in_float32() -> None:
    search = BeamSearch(params(length_penalty=0.6, max_tokens=2))
    first, second = -0.10000000149011612, -0.20000000298023224  # float32 of 0.1 and of 0.2
    advance(search, {5: first, 6: -9.0})
    advance(search, {7: second, 8: -9.0}, {9: -30.0})
    # -0.30000001192092896 / 1.5157166719436646, rounded again; in float64 it would be -0.19792617978...
    assert search.finish()[0].score == -0.19792619347572327


def test_forbidden_tokens_are_never_chosen() -> None:
    search = BeamSearch(params(beam_width=3, num_return=3))
    assert [each.token_id for each in advance(search, {5: -1.0, 6: -math.inf, EOS: -math.inf})] == [5]
    assert [each.token_id for each in advance(search, {6: -1.0, 7: math.nan, 8: -2.0})] == [6, 8]
    assert advance(search, {EOS: -1.0}, {}) == []  # nothing else is allowed
    assert search.finish() == [Hypothesis((5, 6, EOS), -1.0, "eos")]


def test_a_search_without_an_allowed_token_ends_without_an_answer() -> None:
    search = BeamSearch(params())
    assert advance(search, {5: -math.inf, EOS: -math.inf}) == []
    assert search.is_done
    assert (search.finish(), search.common_prefix()) == ([], ())


def test_a_search_ended_from_outside_returns_the_best_so_far() -> None:
    search = BeamSearch(params(beam_width=3, num_return=2))
    assert search.finish() == []
    advance(search, {5: -1.0, 6: -2.0, 7: -3.0})
    advance(search, {8: -2.0, EOS: -1.5, 9: -4.0}, {10: -9.0}, {10: -9.0})
    expected = [Hypothesis((5, EOS), -1.25, "eos"), Hypothesis((5, 8), -1.5, None)]
    assert search.finish() == expected
    assert not search.is_done
    assert search.finish() == expected


def test_the_common_prefix_is_what_all_live_and_returnable_hypotheses_share() -> None:
    search = BeamSearch(params(num_return=1, length_penalty=0.0))
    assert search.common_prefix() == ()
    advance(search, {5: -1.0, 6: -2.0})
    assert search.common_prefix() == ()
    advance(search, {7: -1.0, 8: -1.5}, {9: -9.0})
    assert search.common_prefix() == (5,)
    advance(search, {9: -0.1, 10: -0.2}, {9: -9.0})
    assert search.common_prefix() == (5, 7)
    advance(search, {11: -0.1, EOS: -0.2, 13: -0.3}, {12: -9.0})  # (5, 7, 9) ends with -2.3
    assert search.common_prefix() == (5, 7, 9)
    advance(search, {EOS: -0.2, 12: -0.4}, {13: -9.0})  # a second ends, with -2.4; none can do better
    assert search.is_done
    assert search.common_prefix() == search.finish()[0].token_ids == (5, 7, 9, EOS)


def test_the_details_of_the_common_prefix_go_with_its_tokens() -> None:
    search = BeamSearch(params(num_return=1, length_penalty=0.0, max_tokens=2))
    assert (search.num_live, search.common_details()) == (1, ())
    search.advance([[Candidate(5, -1.0, "five"), Candidate(6, -4.0, "six")]])
    assert (search.num_live, search.common_details()) == (2, ())
    search.advance([[Candidate(7, -1.0, "seven"), Candidate(8, -1.5, "eight")], [Candidate(9, -9.0, "nine")]])
    assert search.num_live == 0
    assert (search.common_prefix(), search.common_details()) == ((5, 7), ("five", "seven"))
    assert search.common_details(1) == ("seven",)
    nothing = BeamSearch(params())
    advance(nothing, {})
    assert (nothing.num_live, nothing.common_details()) == (0, ())


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.4])
def test_a_width_that_holds_everything_finds_what_enumeration_finds(
    early_stopping: bool | Literal["never"], length_penalty: float
) -> None:
    """Three tokens, one of them the end, in at most 3 steps: 1 + 2 + 12 hypotheses, fewer than 16."""
    table = {EOS: {EOS: -1.0, 5: -1.0, 6: -1.0}, 5: {EOS: -0.9, 5: -1.5, 6: -0.95}, 6: {EOS: -2.5, 5: -0.3, 6: -1.8}}
    expected = []
    for length in (1, 2, 3):
        for output in product((EOS, 5, 6), repeat=length):
            if EOS not in output[:-1] and (output[-1] == EOS or length == 3):
                score = sum(table[before][token] for before, token in zip((5, *output), output, strict=False))
                expected.append((score / length**length_penalty, output))
    search = BeamSearch(params(16, 16, max_tokens=3, length_penalty=length_penalty, early_stopping=early_stopping))
    last_tokens = [5]
    while last_tokens:
        last_tokens = [each.token_id for each in advance(search, *(table[token] for token in last_tokens))]
    found = [(each.score, each.token_ids) for each in search.finish()]
    assert len(found) == len(expected) == 15
    assert [score for score, _ in found] == pytest.approx(sorted((score for score, _ in expected), reverse=True))
    assert {output: score for score, output in found} == pytest.approx({output: score for score, output in expected})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam_width": 1, "num_return": 1}, "beam_width is 1: give at least 2"),
        ({"num_return": 0}, "num_return is 0: give 1 to 2"),
        ({"num_return": 3}, "num_return is 3: give 1 to 2"),
        ({"max_tokens": 0}, "max_tokens is 0: give at least 1"),
        ({"early_stopping": "always"}, "early_stopping is 'always': give True, False or"),
        ({"length_penalty": math.nan}, "length_penalty is nan"),
        ({"length_penalty": math.inf}, "length_penalty is inf"),
        ({"length_penalty": -30.0}, "length_penalty is -30"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        params(**changes)


def test_a_length_penalty_may_go_to_the_bound_of_what_a_score_can_hold() -> None:
    bound = 60.0 / math.log(7)
    assert bound * math.log(7) == 60.0
    assert params(max_tokens=7, length_penalty=bound).length_penalty == bound


# Few levels and many ties, sums that are exact in float32, and tokens that are not allowed.
LOGPROBS = st.sampled_from([-0.25, -0.5, -1.0, -1.25, -3.0, -8.0, -math.inf])
VOCABULARY = range(9)


@st.composite
def searches(draw: st.DrawFn) -> tuple[BeamSearchParams, list[list[list[Candidate]]]]:
    """Parameters, and the candidates of all tokens, most likely first, for each step and each possible beam."""
    beam_width = draw(st.integers(2, 4))
    drawn = params(
        beam_width=beam_width,
        num_return=draw(st.integers(1, beam_width)),
        max_tokens=draw(st.integers(1, 6)),
        length_penalty=draw(st.sampled_from([-1.0, 0.0, 0.6, 1.0, 1.4])),
        early_stopping=draw(st.sampled_from(EARLY_STOPPING)),
        num_eos=draw(st.integers(0, 2)),
    )
    row = st.lists(LOGPROBS, min_size=len(VOCABULARY), max_size=len(VOCABULARY)).map(
        lambda logprobs: sorted(map(Candidate, VOCABULARY, logprobs), key=lambda each: each.logprob, reverse=True)
    )
    steps = st.lists(row, min_size=beam_width, max_size=beam_width)
    return drawn, draw(st.lists(steps, min_size=drawn.max_tokens, max_size=drawn.max_tokens))


SAME_EVERYWHERE = settings(
    max_examples=200,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def first(rows: Sequence[Sequence[Candidate]], num_beams: int, num_candidates: int) -> list[Sequence[Candidate]]:
    return [row[:num_candidates] for row in rows[:num_beams]]


@SAME_EVERYWHERE
@given(searches())
def test_what_was_streamed_begins_every_answer_however_the_search_ends(
    drawn: tuple[BeamSearchParams, list[list[list[Candidate]]]],
) -> None:
    search, num_live = BeamSearch(drawn[0]), 1
    streamed: tuple[int, ...] = ()
    for rows in drawn[1]:
        survivors = search.advance(first(rows, num_live, search.num_candidates))
        assert len(survivors) <= drawn[0].beam_width
        assert all(0 <= each.parent < num_live for each in survivors)
        assert len({(each.parent, each.token_id) for each in survivors}) == len(survivors)
        assert [each.score for each in survivors] == sorted((each.score for each in survivors), reverse=True)
        assert not drawn[0].eos_token_ids & {each.token_id for each in survivors}
        assert search.common_prefix()[: len(streamed)] == streamed
        streamed = search.common_prefix()
        answers = search.finish()
        assert len(answers) <= drawn[0].num_return
        assert all(each.token_ids[: len(streamed)] == streamed for each in answers)
        assert [each.score for each in answers] == sorted((each.score for each in answers), reverse=True)
        assert len({each.token_ids for each in answers}) == len(answers)
        num_live = len(survivors)
        assert search.is_done == (num_live == 0)
        if search.is_done:
            assert all(each.finish is not None for each in answers)
            return
    raise AssertionError("a search is done at max_tokens")


@SAME_EVERYWHERE
@given(searches())
def test_more_candidates_than_asked_for_and_less_than_mattered_decide_alike(
    drawn: tuple[BeamSearchParams, list[list[list[Candidate]]]],
) -> None:
    """num_candidates are enough; and survivors and ending candidates alone replay a search."""
    asked, whole, replayed = (BeamSearch(drawn[0]) for _ in range(3))
    num_live = 1
    for step, rows in enumerate(drawn[1], start=1):
        given_rows = first(rows, num_live, asked.num_candidates)
        survivors = asked.advance(given_rows)
        assert whole.advance(first(rows, num_live, len(VOCABULARY))) == survivors
        lives_on = {(each.parent, each.token_id) for each in survivors}
        decisive = [
            [each for each in row if (parent, each.token_id) in lives_on or each.token_id in drawn[0].eos_token_ids]
            for parent, row in enumerate(given_rows)
        ]
        if not survivors:
            assert step == drawn[0].max_tokens or asked.is_done
            break
        assert replayed.advance(decisive) == survivors
        assert asked.finish() == whole.finish() == replayed.finish()
        assert asked.common_prefix() == whole.common_prefix() == replayed.common_prefix()
        num_live = len(survivors)
    assert asked.finish() == whole.finish()


@SAME_EVERYWHERE
@given(searches())
def test_contenders_alone_decide_what_all_candidates_decide(
    drawn: tuple[BeamSearchParams, list[list[list[Candidate]]]],
) -> None:
    whole, narrowed = BeamSearch(drawn[0]), BeamSearch(drawn[0])
    num_live = 1
    for rows in drawn[1]:
        asked = first(rows, num_live, whole.num_candidates)
        places = narrowed.contenders(
            [[each.token_id for each in row] for row in asked], [[each.logprob for each in row] for row in asked]
        )
        assert sum(map(len, places)) <= 2 * drawn[0].beam_width
        chosen = [[row[place] for place in kept] for row, kept in zip(asked, places, strict=True)]
        survivors = whole.advance(asked)
        assert narrowed.advance(chosen) == survivors
        assert narrowed.finish() == whole.finish()
        assert narrowed.common_prefix() == whole.common_prefix()
        num_live = len(survivors)
        if whole.is_done:
            return
    raise AssertionError("a search is done at max_tokens")
