"""A grammar whose masks cost too much fails alone: neither the step nor the grammars beside it wait for it."""

import json
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from structlog.testing import capture_logs

from common.faithful_tokenizer import faithful_tokenizer
from tests.services import DEMO_MODEL
from worker_svc.sampling import grammar_matcher
from worker_svc.sampling.grammar_matcher import GrammarVocabulary, SeatMatcher
from worker_svc.sampling.mask_makers import FREE_MASK_CPU_S

VOCAB_SIZE, EOS = 2048, 2
# Each text can be read in many ways, whose number grows with it.
AMBIGUOUS = 'start: e\ne: e e | e "+" e | "(" e ")" | W\nW: /[a-z ]/'
# The same at once behind "1": 512 rules that can each begin with each of the others.
_KINDS = range(8)
DENSE = 'start: "1" e0\nW: /[a-z ]/\n' + "\n".join(
    f"e{i}: W | " + " | ".join(f"e{j} e{k}" for j in _KINDS for k in _KINDS) for i in _KINDS
)
PLAIN = "start: /[a-z ]{1,2000}/"


@cache
def tokenizer_json() -> bytes:
    return faithful_tokenizer((DEMO_MODEL / "tokenizer.json").read_bytes(), VOCAB_SIZE)


def new_vocabulary(*, limits_time: bool = True) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer_json(), VOCAB_SIZE, [EOS], limits_time=limits_time)


@cache
def token(letter: str) -> int:
    found: int = json.loads(tokenizer_json())["model"]["vocab"][letter]
    return found


def begun(vocabulary: GrammarVocabulary, lark: str, output: Sequence[int] = ()) -> SeatMatcher:
    matcher = SeatMatcher(json.dumps({"grammars": [{"lark_grammar": lark}]}))
    matcher.begin(vocabulary, output, None)
    return matcher


def has_tokens(vocabulary: GrammarVocabulary, *matchers: SeatMatcher) -> list[bool]:
    return [bool(each) for each in np.any(vocabulary.masks(matchers), axis=1)]


def test_an_output_that_can_be_read_in_too_many_ways_fails_by_a_limit_that_is_the_same_everywhere() -> None:
    vocabulary = new_vocabulary(limits_time=False)
    short, long = (begun(vocabulary, AMBIGUOUS, [token("a")] * length) for length in (40, 200))
    plain = begun(vocabulary, PLAIN, [token("a")] * 200)
    with capture_logs() as logs:
        assert has_tokens(vocabulary, plain, long, short) == [True, False, True]
    assert [("limit 10000" in each["reason"], each["num_tokens"]) for each in logs] == [(True, 200)]
    assert has_tokens(vocabulary, plain, long, short) == [True, False, True]


def test_a_mask_that_takes_too_long_is_not_waited_for_and_its_grammar_fails_at_once_when_tried_again() -> None:
    vocabulary = new_vocabulary()
    plain, before = begun(vocabulary, PLAIN), begun(vocabulary, DENSE)
    alike = [begun(vocabulary, DENSE, [token("1")]) for _ in range(3)]
    with capture_logs() as logs:
        assert has_tokens(vocabulary, *alike, plain, before) == [False, False, False, True, True]
        again = begun(vocabulary, DENSE, [token("1")])
        assert has_tokens(vocabulary, again, plain, before) == [False, True, True]
    reasons = [each["reason"] for each in logs]
    assert len(reasons) == 4 and all("take more than 0.25 s of processor time" in each for each in reasons[:3])
    assert "a moment ago" in reasons[3]


def test_masks_that_cost_too_much_together_fail_their_own_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_matcher, "FREE_MASK_CPU_S", 0.0)
    monkeypatch.setattr(grammar_matcher, "MOST_EXCESS_CPU_S", 0.01)
    vocabulary = new_vocabulary()
    costly = begun(vocabulary, AMBIGUOUS)
    for _ in range(100):
        if not has_tokens(vocabulary, costly)[0]:
            break
        costly.follow([token("a")])
    assert costly.has_failed()
    assert has_tokens(vocabulary, begun(vocabulary, AMBIGUOUS)) == [True], "a shorter output may go on"


def test_where_processes_must_agree_time_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_matcher, "FREE_MASK_CPU_S", 0.0)
    monkeypatch.setattr(grammar_matcher, "MOST_EXCESS_CPU_S", 0.0)
    vocabulary = new_vocabulary(limits_time=False)
    matcher = begun(vocabulary, AMBIGUOUS)
    for _ in range(20):
        assert has_tokens(vocabulary, matcher) == [True]
        matcher.follow([token("a")])


def test_the_next_owner_of_a_seat_pays_for_what_its_output_shares_with_the_last_alone() -> None:
    """Regression: beams, which are placed anew at each step, began at nothing each time, and never came to a limit."""
    vocabulary = new_vocabulary()
    last = begun(vocabulary, PLAIN)
    for _ in range(5):
        last.charge(FREE_MASK_CPU_S + 0.125)
        last.follow([token("a")])
    for num_shared in (3, 0):
        output, earlier, last = [token("a")] * num_shared + [token("b")], last, SeatMatcher(last.grammar)
        last.begin(vocabulary, output, earlier)
        assert last.charge(0.0) == pytest.approx(0.125 * (num_shared + 1))
