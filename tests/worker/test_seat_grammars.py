"""Grammars of seats: the masks are those of the definition, whatever the seats held before."""

import json
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from common.sampling_params import SequenceSampling
from common.step import SequenceState
from worker_svc.sampling.grammar_matcher import GrammarVocabulary
from worker_svc.sampling.seat_grammars import SeatGrammars

EOS = 0
MERGES = (("a", "b"), ("ab", "a"), ("b", "b"))
TOKENS = ["<end>", "a", "b", "c", "ab", "aba", "bb"]
VOCAB_SIZE = 40  # of the model; the tokenizer has fewer
PROMPT = [1, 2, 3]
outputs = st.text(alphabet="ab", max_size=6)
choices = st.lists(st.text(alphabet="abc", min_size=1, max_size=7), min_size=1, max_size=4)


@cache
def vocabulary() -> GrammarVocabulary:
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=list(MERGES)))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return GrammarVocabulary(tokenizer.to_str().encode(), VOCAB_SIZE, [EOS])


@pytest.fixture(scope="module")
def grammars() -> Iterator[SeatGrammars]:
    yield SeatGrammars(vocabulary)


def grammar_of(texts: Sequence[str]) -> str:
    return json.dumps({"grammars": [{"lark_grammar": "start: " + " | ".join(map(json.dumps, texts))}]})


def place(
    grammars: SeatGrammars,
    seat: int,
    texts: Sequence[str],
    output: Sequence[int],
    position: int = 0,
    *,
    forces: bool = False,
) -> None:
    known = [*PROMPT, *output]
    sampling = SequenceSampling(seed=0, grammar=grammar_of(texts), forces_text=forces)
    state = SequenceState(
        seat=seat,
        position=position,
        block_table=[0],
        token_ids=known[position:],
        history=known[:position],
        num_prompt_tokens=len(PROMPT),
        sampling=sampling,
    )
    grammars.apply([state])


def allowed(grammars: SeatGrammars, *seats: int) -> list[set[int]]:
    masks = grammars.masks(grammars.matched(np.array(seats)))
    assert masks is not None and masks.rows.tolist() == list(range(len(seats)))
    bits = np.unpackbits(masks.wait().view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def defined(texts: Sequence[str], output: str) -> set[int]:
    """Tokens after which the output still begins one of the texts; the end where it is one."""
    ids = {i for i, token in enumerate(TOKENS[1:], 1) if any(text.startswith(output + token) for text in texts)}
    return ids | ({EOS} if output in texts else set())


def assert_defined(found: set[int], texts: Sequence[str], output: str) -> None:
    """Compare a mask with the definition: it may have one token alone where the next characters are certain."""
    expected = defined(texts, output)
    if found != expected:
        nexts = {text[len(output) : len(output) + 1] for text in texts if text.startswith(output)}
        assert len(found) == len(nexts) == 1 and found < expected and "" not in nexts


def walk(texts: Sequence[str], steps: Sequence[int]) -> list[int]:
    """Token ids of an output that the definition allows, by a number for each choice."""
    output: list[int] = []
    for step in steps:
        options = sorted(defined(texts, "".join(TOKENS[each] for each in output)) - {EOS})
        if not options:
            break
        output.append(options[step % len(options)])
    return output


def text_of(output: Sequence[int]) -> str:
    return "".join(TOKENS[each] for each in output)


@settings(max_examples=150)
@given(
    owners=st.lists(st.tuples(choices, st.lists(st.integers(0, 6), max_size=4), st.booleans()), min_size=1, max_size=4),
    followed=st.lists(st.integers(0, 6), max_size=3),
)
def test_masks_are_those_of_the_definition_whoever_had_the_seat_before(
    grammars: SeatGrammars, owners: list[tuple[list[str], list[int], bool]], followed: list[int]
) -> None:
    texts: list[str] = []
    for new_texts, steps, has_same_grammar in owners:
        texts = texts if texts and has_same_grammar else new_texts
        output = walk(texts, steps)
        place(grammars, 5, texts, output, position=len(PROMPT) + len(output) // 2)
        assert_defined(allowed(grammars, 5)[0], texts, text_of(output))
    for step in followed:
        options = sorted(defined(texts, text_of(output)) - {EOS})
        if options:
            output = [*output, options[step % len(options)]]
            grammars.follow(grammars.matched(np.array([5])), [output[-1]])
            assert_defined(allowed(grammars, 5)[0], texts, text_of(output))


def test_only_the_tokenizers_own_token_is_left_where_the_text_is_certain(grammars: SeatGrammars) -> None:
    place(grammars, 5, ["abc"], [])
    assert allowed(grammars, 5) == [{TOKENS.index("ab")}]


def test_a_token_that_is_not_of_the_grammar_fails_its_seat_alone(grammars: SeatGrammars) -> None:
    place(grammars, 1, ["abc", "cab"], [])
    place(grammars, 2, ["abc", "cab"], [])
    grammars.follow(grammars.matched(np.array([1, 2])), [TOKENS.index("bb"), TOKENS.index("ab")])
    assert allowed(grammars, 1, 2) == [set(), {TOKENS.index("c")}]
    place(grammars, 1, ["abc"], [])
    assert allowed(grammars, 1, 2) == [{TOKENS.index("ab")}, {TOKENS.index("c")}]


def test_a_grammar_that_cannot_be_compiled_fails_its_seat_alone(grammars: SeatGrammars) -> None:
    place(grammars, 1, ["abc"], [])
    bad = SequenceSampling(seed=0, grammar='{"grammars": [{"lark_grammar": "start: nothing"}]}')
    grammars.apply(
        [SequenceState(seat=3, position=0, block_table=[0], token_ids=PROMPT, num_prompt_tokens=3, sampling=bad)]
    )
    assert allowed(grammars, 3, 1) == [set(), {TOKENS.index("ab")}]


def test_after_its_end_an_output_has_nothing_but_the_end(grammars: SeatGrammars) -> None:
    place(grammars, 1, ["ab"], [TOKENS.index("ab")])
    assert allowed(grammars, 1) == [{EOS}]
    for _ in range(3):  # as a step in flight samples once more
        grammars.follow(grammars.matched(np.array([1])), [EOS])
        assert allowed(grammars, 1) == [{EOS}]


def test_what_was_sampled_for_an_earlier_owner_is_not_followed_by_the_next(grammars: SeatGrammars) -> None:
    place(grammars, 1, ["abc"], [])
    matched = grammars.matched(np.array([1]))
    place(grammars, 1, ["abc"], [])
    grammars.follow(matched, [TOKENS.index("ab")])
    assert allowed(grammars, 1) == [{TOKENS.index("ab")}]


def test_seats_without_a_grammar_have_no_masks(grammars: SeatGrammars) -> None:
    place(grammars, 1, ["abc"], [])
    plain = SequenceSampling(seed=0)
    grammars.apply(
        [SequenceState(seat=1, position=0, block_table=[0], token_ids=PROMPT, num_prompt_tokens=3, sampling=plain)]
    )
    assert grammars.matched(np.array([1])) is None
    assert grammars.masks(None) is None


@settings(max_examples=150)
@given(texts=choices, steps=st.lists(st.integers(0, 6), max_size=4), room=st.integers(1, 5), forces=st.booleans())
def test_forced_tokens_are_those_that_masks_leave_alone(
    grammars: SeatGrammars, texts: list[str], steps: list[int], room: int, forces: bool
) -> None:
    output = walk(texts, steps)
    place(grammars, 5, texts, output, forces=forces)
    place(grammars, 6, texts, output)
    (forced,) = grammars.force([5], [room])
    assert len(forced) <= room
    for token_id in forced:
        assert allowed(grammars, 6) == [{token_id}]
        grammars.follow(grammars.matched(np.array([6])), [token_id])
    assert allowed(grammars, 5) == allowed(grammars, 6)
    if len(forced) < room:
        assert grammars.force([5, 6], [room, room]) == [[], []]


def test_a_seat_that_forced_tokens_is_taken_over_where_its_output_went_on(grammars: SeatGrammars) -> None:
    place(grammars, 1, ["abcabcab"], [], forces=True)
    assert grammars.force([1], [2]) == [[TOKENS.index("ab"), TOKENS.index("c")]]
    grammars.follow(grammars.matched(np.array([1])), [TOKENS.index("ab")])
    place(grammars, 1, ["abcabcab"], [TOKENS.index("ab"), TOKENS.index("c"), TOKENS.index("ab")], forces=True)
    assert grammars.force([1], [9]) == [[TOKENS.index("c"), TOKENS.index("ab")]]
    assert allowed(grammars, 1) == [{EOS}]


def test_a_seat_whose_grammar_failed_forces_nothing(grammars: SeatGrammars) -> None:
    place(grammars, 1, ["abc", "cab"], [], forces=True)
    grammars.follow(grammars.matched(np.array([1])), [TOKENS.index("bb")])
    assert grammars.force([1], [3]) == [[]]


class UnreadPrompt(list[int]):
    """Tokens that nobody may go through one by one."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a prompt may have a million tokens")


@pytest.mark.parametrize("position", [0, 2, 3, 4, 5])
def test_a_grammar_follows_an_output_without_reading_the_prompt(grammars: SeatGrammars, position: int) -> None:
    """Regression: for each beam of a search, at each step, the whole context was copied number by number."""
    known = [*PROMPT, TOKENS.index("ab"), TOKENS.index("c")]
    state = SequenceState(
        seat=1,
        position=position,
        block_table=[0],
        token_ids=UnreadPrompt(known[position:]),
        history=UnreadPrompt(known[:position]),
        num_prompt_tokens=len(PROMPT),
        sampling=SequenceSampling(seed=0, grammar=grammar_of(["abcab"])),
    )
    grammars.apply([state])
    assert allowed(grammars, 1) == [{TOKENS.index("ab")}]
