"""Text token by token against `tokenizers` decoding all tokens at once: random texts, cut anywhere into prompt and
output, with stop strings out of the text itself, for each kind of tokenizer in use.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scheduler_svc.requests.live.live_sample import context_of
from scheduler_svc.text.output_text import OutputText
from scheduler_svc.text.tokenizer import ModelTokenizer
from tests.scheduler.text_tokenizers import MARKERS, byte_fallback_json, byte_level_json, ours

REPLACEMENT = "\ufffd"


@lru_cache
def metaspace_json() -> bytes:
    """Tokenizer like that of T5 and newer LLaMA 2 files: words begin with "▁", and the decoder knows it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    corpus = ["the dog sleeps in 한국어 हिन्दी and 你好 world, or so they say, every day"] * 20
    tokenizer.train_from_iterator(
        corpus, trainers.UnigramTrainer(vocab_size=90, special_tokens=["<unk>", "<s>"], unk_token="<unk>")
    )
    return tokenizer.to_str().encode()


KINDS: dict[str, Callable[[], bytes]] = {
    "byte_fallback": byte_fallback_json,
    "byte_level": byte_level_json,
    "metaspace": metaspace_json,
}
WORDS = ["the", "dog", " sleeps", "한국어", "हिन्दी", "你好", "👩\u200d👧", "é", " ", "\n", "世", "a", ",", "x한"]
TEXT = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)
many = settings(max_examples=400)


@lru_cache
def tokenizer_of(kind: str) -> ModelTokenizer:
    return ours(KINDS[kind]())


def output_text(tokenizer: ModelTokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> OutputText:
    return OutputText(
        tokenizer,
        context_of(prompt, tokenizer, keep_special_tokens=False),
        stop=stop,
        min_tokens=0,
        include_stop=False,
        keep_special_tokens=False,
    )


def outcome(output: OutputText, token_ids: Sequence[int]) -> tuple[str, str | None]:
    """The text, and the stop string that ended it."""
    for each in token_ids:
        if (stop := output.push(each)) is not None:
            return output.text, stop
    stop = output.finish()
    return output.text, stop


def stopped(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Reference: the stop string that ends first in the whole text, the longest if several do."""
    for end in range(1, len(text) + 1):
        for each in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(each):
                return text[: end - len(each)], each
    return text, None


@many
@given(text=TEXT, kind=st.sampled_from(sorted(KINDS)), cut=st.floats(0, 1))
@example(text="한국어 dog", kind="byte_fallback", cut=0.9)
@example(text="हिन्दी dog", kind="byte_fallback", cut=0.9)
def test_the_output_continues_the_prompt_wherever_it_is_cut(text: str, kind: str, cut: float) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode(text, True)
    num_prompt = round(cut * len(token_ids))
    before, whole = tokenizer.decode(token_ids[:num_prompt], False), tokenizer.decode(token_ids, False)
    assume(not before.endswith(REPLACEMENT) and whole.startswith(before))
    found, _ = outcome(output_text(tokenizer, token_ids[:num_prompt]), token_ids[num_prompt:])
    assert found == whole[len(before) :]


@many
@given(
    text=TEXT,
    kind=st.sampled_from(sorted(KINDS)),
    num_lost=st.integers(0, 3),
    data=st.data(),
)
def test_a_stop_string_is_found_as_in_the_whole_text_also_in_what_is_held_back_at_the_end(
    text: str, kind: str, num_lost: int, data: st.DataObject
) -> None:
    """The output may end within a character: then its last characters are replacement characters."""
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode(text, False)
    token_ids = token_ids[: max(0, len(token_ids) - num_lost)]
    whole, _ = outcome(output_text(tokenizer, ()), token_ids)
    assume(whole)
    begins = data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=3))
    stop = [whole[begin : begin + data.draw(st.integers(1, 4))] for begin in begins]
    assert outcome(output_text(tokenizer, (), stop), token_ids) == stopped(whole, stop)


@pytest.mark.parametrize("num_characters", range(1, 30))
@pytest.mark.parametrize("character", ["é", "한", "👋"])
def test_behind_any_number_of_characters_of_several_bytes_the_first_word_keeps_its_space(
    character: str, num_characters: int
) -> None:
    tokenizer = tokenizer_of("byte_fallback")
    prompt = tokenizer.encode(character * num_characters, True)
    text, _ = outcome(output_text(tokenizer, prompt), tokenizer.encode("the dog", False))
    assert text == " the dog"


@pytest.mark.parametrize("num_bad", [1, 7, 8, 9, 40])
def test_behind_bytes_that_are_no_text_the_first_word_keeps_its_space(num_bad: int) -> None:
    tokenizer = tokenizer_of("byte_fallback")
    bad, dog = 3 + 0xFF, tokenizer.encode("dog", False)
    assert outcome(output_text(tokenizer, [bad] * num_bad), dog)[0] == " dog"
    assert outcome(output_text(tokenizer, ()), [*[bad] * num_bad, *dog])[0] == REPLACEMENT * num_bad + " dog"


def test_behind_many_special_tokens_the_first_word_keeps_its_space() -> None:
    tokenizer = tokenizer_of("byte_fallback")
    (marker,) = (each for each in range(600) if tokenizer.tokens([each]) == [MARKERS[0]])
    prompt = [*tokenizer.encode("the", True), *[marker] * 100]
    assert outcome(output_text(tokenizer, prompt), tokenizer.encode("dog", False))[0] == " dog"


def test_a_stop_string_in_the_last_token_is_found_though_the_token_ends_within_a_character() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "bì": 1}, []))  # "ì" is the first byte of "한" in byte-level spelling
    tokenizer.decoder = decoders.ByteLevel()
    held = ours(tokenizer.to_str().encode())
    assert held.decode([0, 1], False) == "ab" + REPLACEMENT
    assert outcome(output_text(held, (), ["b"]), [0, 1]) == ("a", "b")


def test_an_end_of_sequence_token_releases_no_stop_string_either() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "bì": 1, "c": 2}, []))
    tokenizer.decoder = decoders.ByteLevel()
    output = output_text(ours(tokenizer.to_str().encode()), (), ["b"])
    for each in (0, 1):
        assert output.push(each) is None
    output.push_final(2)
    assert output.text == "a"
