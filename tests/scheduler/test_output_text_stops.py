"""Stop strings and final tokens in OutputText, against a search of the whole text."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from scheduler_svc.text.output_text import OutputText
from scheduler_svc.text.stop_strings import StopStrings
from scheduler_svc.text.tokenizer import ModelTokenizer
from tests.scheduler.text_tokenizers import byte_fallback_json, byte_level_json, ours

PIECES = ["a", "b", "aa", "ab", "ba", "aba", "bbab", "c"]
EOS = len(PIECES)


def tokenizer_of_pieces() -> ModelTokenizer:
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return ours(tokenizer.to_str().encode())


TOKENIZER = tokenizer_of_pieces()
ENGLISH = ours(byte_level_json())


def output_text(
    stop: Sequence[str],
    min_tokens: int = 0,
    include_stop: bool = False,
    tokenizer: ModelTokenizer = TOKENIZER,
    keep_special_tokens: bool = False,
) -> OutputText:
    return OutputText(
        tokenizer,
        (),
        stop=stop,
        min_tokens=min_tokens,
        include_stop=include_stop,
        keep_special_tokens=keep_special_tokens,
    )


def push_text(output: OutputText, text: str, tokenizer: ModelTokenizer = ENGLISH) -> list[str | None]:
    """Pushes the text's tokens until one completes a stop string."""
    answers: list[str | None] = []
    for each in tokenizer.encode(text, False):
        answers.append(output.push(each))
        if answers[-1] is not None:
            break
    return answers


@dataclass(frozen=True)
class Outcome:
    text: str
    stop: str | None
    num_tokens: int


def by_whole_search(token_ids: Sequence[int], stop: Sequence[str], min_tokens: int, include_stop: bool) -> Outcome:
    """Looks at every end of the text from the left, at every stop string there from the longest."""
    text, num_tokens_at = "", [0]
    for i, token_id in enumerate(token_ids):
        text += PIECES[token_id]
        num_tokens_at += [i + 1] * len(PIECES[token_id])
    for end in range(1, len(text) + 1):
        for each in sorted(stop, key=len, reverse=True):
            if num_tokens_at[end] >= min_tokens and text[:end].endswith(each):
                cut = end if include_stop else end - len(each)
                return Outcome(text[:cut], each, num_tokens_at[end])
    return Outcome(text, None, len(token_ids))


def num_released(text: str, stop: Sequence[str]) -> int:
    """Length without the longest suffix that is a proper prefix of a stop string."""
    held = [n for each in stop for n in range(1, len(each)) if text.endswith(each[:n])]
    return len(text) - max(held, default=0)


@pytest.mark.long
@settings(max_examples=1500)
@given(
    token_ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=25),
    stop=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=5),
    min_tokens=st.integers(0, 12),
    include_stop=st.booleans(),
)
def test_stop_strings_are_found_as_in_the_whole_text_however_it_is_cut(
    token_ids: list[int], stop: list[str], min_tokens: int, include_stop: bool
) -> None:
    expected = by_whole_search(token_ids, stop, min_tokens, include_stop)
    output = output_text(stop, min_tokens, include_stop)
    found, released = None, []
    for i, each in enumerate(token_ids):
        found = output.push(each)
        released.append(output.text)
        if found is not None:
            break
        assert len(output.text) == num_released("".join(PIECES[each] for each in token_ids[: i + 1]), stop)
    output.finish()
    assert Outcome(output.text, found, len(output.released_ends)) == expected
    assert output.released_ends == [len(each) for each in released]
    assert all(output.text.startswith(each) for each in released)


@settings(max_examples=200)
@given(st.text("ab", max_size=60), st.lists(st.text("ab", min_size=1, max_size=8), max_size=16))
def test_the_automaton_knows_at_each_character_what_ends_and_what_may_begin(text: str, strings: list[str]) -> None:
    automaton, state = StopStrings(strings), 0
    for end in range(1, len(text) + 1):
        state = automaton.advance(state, text[end - 1])
        endings = [each for each in strings if text[:end].endswith(each)]
        assert automaton.completed[state] == max(endings, key=len, default=None)
        assert automaton.num_held[state] == end - num_released(text[:end], strings)


def test_a_stop_string_is_found_across_tokens_and_cut_from_the_text() -> None:
    output = output_text(["times, it was"], tokenizer=ENGLISH)
    answers = push_text(output, "It was the best of times, it was the worst of times.")
    assert len(answers) > 3
    assert answers[-1] == "times, it was"
    assert output.text == "It was the best of "
    assert output.released_ends[-1] == len(output.text)
    output.finish()
    assert output.text == "It was the best of "


def test_an_included_stop_string_ends_the_text_and_what_its_token_has_behind_it_is_cut() -> None:
    output = output_text(["bb"], include_stop=True)
    assert output.push(PIECES.index("a")) is None
    assert output.push(PIECES.index("bbab")) == "bb"
    assert output.text == "abb"


@pytest.mark.parametrize("stop", ["👩‍👩‍👧", "你好，世", "\ufe0f", "é"])
@pytest.mark.parametrize("tokenizer_json", [byte_level_json(), byte_fallback_json()])
def test_stop_strings_of_several_bytes_per_character_are_found(stop: str, tokenizer_json: bytes) -> None:
    tokenizer = ours(tokenizer_json)
    output = output_text([stop, "never"], tokenizer=tokenizer)
    assert push_text(output, f"the dog 👩‍🚀 {stop} sleeps", tokenizer)[-1] == stop
    assert output.text == "the dog 👩‍🚀 "


def test_the_string_that_ends_first_wins_and_of_those_that_end_together_the_longest() -> None:
    for tokens_of_the_same_text in (["aba"], ["a", "ba"], ["ab", "a"], ["a", "b", "a"]):
        output = output_text(["aba", "b", "ab"])
        found = (output.push(PIECES.index(each)) for each in tokens_of_the_same_text)
        assert next(each for each in found if each) == "ab"
        assert output.text == ""


def test_a_stop_string_that_is_complete_before_min_tokens_is_text() -> None:
    output = output_text(["ab"], min_tokens=3)
    assert [output.push(PIECES.index(each)) for each in ("ab", "c")] == [None, None]
    assert output.text == "abc"
    assert output.push(PIECES.index("ab")) == "ab"
    assert output.text == "abc"


def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_is_cut_whole() -> None:
    output = output_text(["aab"], min_tokens=3)
    assert [output.push(PIECES.index(each)) for each in ("c", "aa", "b")] == [None, None, "aab"]
    assert output.text == "c"


def test_what_might_have_become_a_stop_string_is_released_at_the_end() -> None:
    output = output_text(["abab"])
    output.push(PIECES.index("c"))
    output.push(PIECES.index("aba"))
    assert (output.text, output.released_ends) == ("c", [1, 1])
    output.finish()
    output.finish()
    assert (output.text, output.released_ends) == ("caba", [1, 1])


def test_a_final_token_counts_and_releases_what_was_held_but_is_no_text() -> None:
    output = output_text(["abab"])
    output.push(PIECES.index("aba"))
    output.push_final(EOS)
    assert (output.text, output.released_ends) == ("aba", [0, 3])
    output.finish()
    assert (output.text, output.released_ends) == ("aba", [0, 3])


@pytest.mark.parametrize("keep_special_tokens", [True, False])
def test_an_included_final_token_is_text_as_any_other_token_is(keep_special_tokens: bool) -> None:
    output = output_text(["abab"], include_stop=True, keep_special_tokens=keep_special_tokens)
    output.push(PIECES.index("aba"))
    output.push_final(EOS)
    assert (output.text, output.released_ends) == (("aba</s>", [0, 7]) if keep_special_tokens else ("aba", [0, 3]))
    plain = output_text([], include_stop=True)
    plain.push_final(PIECES.index("bbab"))
    assert (plain.text, plain.released_ends) == ("bbab", [4])


def test_an_included_final_word_keeps_its_space() -> None:
    tokenizer = ours(byte_fallback_json())
    the, dog = tokenizer.encode("the", False), tokenizer.encode("dog", False)
    output = OutputText(tokenizer, the, stop=(), min_tokens=0, include_stop=True, keep_special_tokens=False)
    for each in dog[:-1]:
        output.push(each)
    output.push_final(dog[-1])
    assert output.text == " dog"


def test_only_what_may_still_become_one_of_the_longest_stop_strings_is_held() -> None:
    """16 strings of 256 bytes, and a text that all but matches them."""
    strings = ["a" * 255 + chr(ord("b") + i) for i in range(16)]
    output = output_text(strings)
    for _ in range(2000):
        assert output.push(PIECES.index("aa")) is None
    assert len(output.text) == 2 * 2000 - 255
    assert output.push(PIECES.index("ab")) == strings[0]
    assert len(output.text) == 2 * 2000 + 2 - 256


def test_nothing_may_come_after_the_end() -> None:
    output = output_text(["c"])
    output.push(PIECES.index("c"))
    with pytest.raises(AssertionError):
        output.push(PIECES.index("a"))
