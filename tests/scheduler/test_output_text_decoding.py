"""Text that OutputText releases token by token, against decoding everything at once."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from scheduler_svc.text.output_text import OutputText
from scheduler_svc.text.tokenizer import ModelTokenizer
from tests.scheduler.text_tokenizers import ALL_KINDS, MIXED_TEXT, byte_fallback_json, byte_level_json, ours, theirs

BYTE_LEVEL = ours(byte_level_json())
BYTE_FALLBACK = ours(byte_fallback_json())
TOKENIZERS = {"byte_level": BYTE_LEVEL, "byte_fallback": BYTE_FALLBACK}
OURS = {kind: ours(content) for kind, content in ALL_KINDS.items()}
THEIRS = {kind: theirs(content) for kind, content in ALL_KINDS.items()}
NUM_TOKENS = min(map(len, THEIRS.values()))
NUM_BYTE_LEVEL_IDS = Tokenizer.from_buffer(byte_level_json()).get_vocab_size()
NUM_BYTE_FALLBACK_IDS = Tokenizer.from_buffer(byte_fallback_json()).get_vocab_size()
PLAIN_TEXT = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from(list("the dog  \n.é你好世界こЖ🙂👋🏽👩\u200d👧\ufe0f\u0301\ufffd")),
    ),
    max_size=30,
)
ANY_TEXT = st.one_of(PLAIN_TEXT, MIXED_TEXT)
ANY_KIND = st.sampled_from(sorted(ALL_KINDS))
fast = settings(max_examples=300)


def byte_token(byte: int) -> int:
    """The byte tokens of the vocabulary with byte fallback stand behind <unk>, <s> and </s>."""
    return 3 + byte


def output_text(
    tokenizer: ModelTokenizer | None, prompt: Sequence[int] = (), keep_special_tokens: bool = False
) -> OutputText:
    return OutputText(
        tokenizer,
        prompt,
        stop=(),
        min_tokens=0,
        include_stop=False,
        keep_special_tokens=keep_special_tokens,
    )


def pushed(output: OutputText, token_ids: Sequence[int]) -> OutputText:
    """Pushes and finishes, and checks that what is released stays released."""
    released: list[str] = []
    for each in token_ids:
        assert output.push(each) is None
        released.append(output.text)
    output.finish()
    assert output.released_ends == [len(each) for each in released]
    assert all(output.text.startswith(each) for each in released)
    return output


@fast
@given(prompt=ANY_TEXT, text=ANY_TEXT, kind=ANY_KIND, keep=st.booleans())
@example(prompt="the dog", text=" sleeps", kind="byte_fallback", keep=False)
@example(prompt="", text="sleeps", kind="byte_fallback", keep=True)
def test_text_continues_the_prompt_as_if_both_were_decoded_at_once(
    prompt: str, text: str, kind: str, keep: bool
) -> None:
    tokenizer = OURS[kind]
    token_ids = tokenizer.encode(prompt + text, True)
    whole = tokenizer.decode(token_ids, keep)
    for cut in range(1, len(token_ids) + 1):
        before = tokenizer.decode(token_ids[:cut], keep)
        if whole.startswith(before) and not before.endswith("\ufffd"):
            output = pushed(output_text(tokenizer, token_ids[:cut], keep), token_ids[cut:])
            assert before + output.text == whole


@fast
@given(
    text=MIXED_TEXT,
    others=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=6),
    kind=ANY_KIND,
    keep=st.booleans(),
)
def test_text_is_what_transformers_decodes_at_once(text: str, others: list[int], kind: str, keep: bool) -> None:
    tokenizer, reference = OURS[kind], THEIRS[kind]
    spelled = [
        each for each in others if "<0x" not in reference.convert_ids_to_tokens(each)
    ]  # runs of byte tokens: see IncrementalDecoder
    token_ids = [*tokenizer.encode(text, True), *spelled]
    output = pushed(output_text(tokenizer, (), keep), token_ids)
    assert output.text == reference.decode(token_ids, skip_special_tokens=not keep)


@fast
@given(
    prompt=st.lists(st.integers(0, NUM_BYTE_LEVEL_IDS - 1), max_size=12),
    token_ids=st.lists(st.integers(0, NUM_BYTE_LEVEL_IDS + 3), max_size=60),
    keep=st.booleans(),
)
def test_any_byte_level_tokens_give_the_text_of_decoding_them_at_once(
    prompt: list[int], token_ids: list[int], keep: bool
) -> None:
    output = pushed(output_text(BYTE_LEVEL, prompt, keep), token_ids)
    assert output.text == BYTE_LEVEL.decode(token_ids, keep)


@fast
@given(
    st.lists(st.one_of(st.sampled_from(BYTE_LEVEL.encode("é你👩", False)), st.integers(4, 259)), max_size=60),
    st.booleans(),
)
def test_broken_bytes_give_the_text_of_decoding_them_at_once(token_ids: list[int], keep: bool) -> None:
    output = pushed(output_text(BYTE_LEVEL, (), keep), token_ids)
    assert output.text == BYTE_LEVEL.decode(token_ids, keep)


@fast
@given(
    st.lists(
        st.one_of(
            st.integers(byte_token(0x100), NUM_BYTE_FALLBACK_IDS + 3).map(lambda each: [each]),
            st.characters(codec="utf-8").map(lambda char: [byte_token(byte) for byte in char.encode()]),
        ),
        max_size=30,
    ),
    st.booleans(),
)
def test_whole_characters_of_byte_tokens_give_the_text_of_decoding_them_at_once(
    parts: list[list[int]], keep: bool
) -> None:
    token_ids = [each for part in parts for each in part]
    output = pushed(output_text(BYTE_FALLBACK, (), keep), token_ids)
    assert output.text == BYTE_FALLBACK.decode(token_ids, keep)


@fast
@given(st.lists(st.integers(0, NUM_BYTE_FALLBACK_IDS - 1), max_size=40), PLAIN_TEXT)
def test_broken_bytes_do_not_touch_the_words_around_them(broken: list[int], text: str) -> None:
    """Runs of byte tokens end at the next word, and so does what one bad byte can spoil."""
    word = BYTE_FALLBACK.encode("the dog sleeps", False)
    assume("\ufffd" not in text)
    tail = BYTE_FALLBACK.encode(text, False)
    output = pushed(output_text(BYTE_FALLBACK, word), [*broken, *word, *tail])
    assert output.text.endswith(
        " the dog sleeps" + BYTE_FALLBACK.decode([*word, *tail], False)[len("the dog sleeps") :]
    )


@fast
@given(st.lists(st.integers(0, NUM_BYTE_FALLBACK_IDS - 1), max_size=40), st.integers(0, 40))
def test_replaying_the_tokens_rebuilds_the_same_releases(token_ids: list[int], num_before: int) -> None:
    first = pushed(output_text(BYTE_FALLBACK, token_ids[:3]), token_ids)
    second = output_text(BYTE_FALLBACK, token_ids[:3])
    for each in token_ids[:num_before]:
        second.push(each)
    assert second.released_ends == first.released_ends[:num_before]
    assert first.text.startswith(second.text)


def test_a_character_is_held_back_until_its_last_byte() -> None:
    output = output_text(BYTE_FALLBACK)
    for byte in "你".encode():
        output.push(byte_token(byte))
    assert (output.text, output.released_ends) == ("你", [0, 0, 1])


@pytest.mark.parametrize(("kind", "expected"), [("byte_level", "a\ufffd"), ("byte_fallback", "a\ufffd\ufffd")])
def test_an_incomplete_character_at_the_end_becomes_the_replacement_character(kind: str, expected: str) -> None:
    tokenizer = TOKENIZERS[kind]
    first_bytes = tokenizer.encode("a\u4e00", False)[:-1]
    output = output_text(tokenizer)
    for each in first_bytes:
        output.push(each)
    assert output.text == "a"
    released_ends = list(output.released_ends)
    output.finish()
    assert output.text == expected == tokenizer.decode(first_bytes, False)
    assert output.released_ends == released_ends, "the rest comes behind the last token"


def test_good_characters_stay_when_a_bad_byte_follows_them() -> None:
    """Decoded at once the whole run would be spoilt: four replacement characters."""
    token_ids = [byte_token(byte) for byte in "你".encode() + b"\xff"] + BYTE_FALLBACK.encode("the", False)
    assert BYTE_FALLBACK.decode(token_ids, False) == "\ufffd\ufffd\ufffd\ufffd the"
    assert pushed(output_text(BYTE_FALLBACK), token_ids).text == "你\ufffd the"


def test_a_prompt_that_ends_within_a_character_is_not_repeated() -> None:
    prompt = BYTE_FALLBACK.encode("the", True) + [byte_token(byte) for byte in "你".encode()[:2]]
    output = pushed(output_text(BYTE_FALLBACK, prompt), BYTE_FALLBACK.encode("dog", False))
    assert output.text == " dog"


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_bytes_that_never_become_text_are_not_held_for_ever(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    (bad,) = [each for each in range(300) if tokenizer.tokens([each]) in (["<0xFF>"], ["ÿ"])]
    output = output_text(tokenizer)
    for num_tokens in range(1, 3000):
        output.push(bad)
        assert len(output.text) > num_tokens - 8
    output.finish()
    assert output.text == "\ufffd" * 2999


@pytest.mark.parametrize("num_bad", range(20))
def test_a_character_behind_any_number_of_bad_bytes_is_whole(num_bad: int) -> None:
    (bad,) = [each for each in range(300) if BYTE_LEVEL.tokens([each]) == ["ÿ"]]
    for text in ("é", "你", "𝄞"):
        token_ids = [bad] * num_bad + BYTE_LEVEL.encode(text + text, False)
        assert pushed(output_text(BYTE_LEVEL), token_ids).text == "\ufffd" * num_bad + text + text


def test_special_tokens_and_unknown_ids_have_no_text_and_hold_nothing_back() -> None:
    the, dog = (BYTE_FALLBACK.encode(each, False) for each in ("the", "dog"))
    silent = [1, 2, 10_000_000] * 20
    output = pushed(output_text(BYTE_FALLBACK, BYTE_FALLBACK.encode("a", True)), [*the, *silent, *dog])
    assert output.text == " the dog"
    assert output.released_ends[len(the) - 1] == len(" the")
    kept = pushed(output_text(BYTE_FALLBACK, (), keep_special_tokens=True), [*the, 2, *dog])
    assert kept.text == "the</s> dog"


def test_the_first_word_keeps_its_space_only_behind_text() -> None:
    dog = BYTE_FALLBACK.encode("dog", False)
    assert pushed(output_text(BYTE_FALLBACK, BYTE_FALLBACK.encode("the", True)), dog).text == " dog"
    assert pushed(output_text(BYTE_FALLBACK, BYTE_FALLBACK.encode("", True)), dog).text == "dog"


def test_tokens_without_any_text_of_their_own_are_passed_over() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "": 1, "▁b": 2}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    output = pushed(output_text(ours(tokenizer.to_str().encode()), [0]), [*[1] * 50, 2])
    assert output.text == " b"


def test_replacement_characters_that_are_words_are_not_held_for_ever() -> None:
    """No cut lies clean between such words; a space may be lost where they are released."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "▁\ufffd": 1}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    output = output_text(ours(tokenizer.to_str().encode()), [0])
    for num_tokens in range(1, 100):
        output.push(1)
        assert output.text.count("\ufffd") > num_tokens - 8
    output.push(0)
    assert output.text.replace(" ", "") == "\ufffd" * 99 + "a"


def test_without_a_tokenizer_tokens_are_counted_and_have_no_text() -> None:
    output = output_text(None)
    output.push(5)
    output.push_final(2)
    output.finish()
    assert (output.text, output.released_ends) == ("", [0, 0])
