"""Forced texts come out as the grammar has them, whatever the tokenizer's stages do to texts."""

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from common.faithful_tokenizer import faithful_tokenizer
from tests.scheduler.text_tokenizers import byte_fallback_json, byte_level_json, metaspace_json, unigram_json
from worker_svc.sampling.grammar_matcher import GrammarVocabulary, SeatMatcher

END = 2
MOST_TOKENS = 1 << 20
TEXTS = ["Cafe\u0301", "\u212b", "\ufa12", "a  b", "The Dog and the dog", "vE wju1", "1\u0301\u00bd", " x"]
PREFIX_SPACE = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
SPLIT = {"type": "Split", "pattern": {"Regex": " ?[a-z]+"}, "behavior": "Isolated", "invert": False}
CHANGES: dict[str, tuple[bytes, dict[str, Any]]] = {
    "as Qwen": (byte_level_json(), {"normalizer": {"type": "NFC"}}),
    "lower case": (byte_level_json(), {"normalizer": {"type": "Lowercase"}}),
    "several": (byte_level_json(), {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}}),
    "a space in front": (byte_level_json(), {"pre_tokenizer": PREFIX_SPACE}),
    "the same in a sequence": (
        byte_level_json(),
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, PREFIX_SPACE]}},
    ),
    "as sentencepiece trains": (unigram_json(), {}),
    "as LLaMA 2": (byte_fallback_json(), {}),
    "as LLaMA 2 since transformers 5": (metaspace_json(), {}),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("text", TEXTS)
def test_a_forced_text_comes_out_unchanged(kind: str, text: str) -> None:
    content, change = CHANGES[kind]
    tokenizer = Tokenizer.from_str(json.dumps({**json.loads(content), **change}))
    assert forced(tokenizer, text, tokenizer.get_vocab_size()) == text


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("content", [byte_level_json(), byte_fallback_json()])
def test_tokens_that_the_model_does_not_have_are_none_of_a_grammar_s(content: bytes, is_special: bool) -> None:
    """Padding, for example, that a tokenizer was given and the embedding was not."""
    tokenizer = Tokenizer.from_buffer(content)
    vocab_size = tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken("[PAD]", special=is_special), AddedToken("the dog", special=is_special)])
    assert forced(tokenizer, "[PAD] the dog", vocab_size) == "[PAD] the dog"


def forced(tokenizer: Tokenizer, text: str, vocab_size: int) -> str:
    """The text that comes out of a grammar that allows this text alone."""
    vocabulary = GrammarVocabulary(faithful_tokenizer(tokenizer.to_str().encode(), vocab_size), vocab_size, [END])
    matcher = SeatMatcher(json.dumps({"grammars": [{"lark_grammar": f"start: {json.dumps(text)}"}]}))
    matcher.begin(vocabulary, [], None)
    output = tokenizer.encode("x", add_special_tokens=False).ids  # before it, so that a first space stays
    before = len(tokenizer.decode(output))
    while matcher.matcher is not None and not matcher.matcher.is_stopped():
        words = vocabulary.masks([matcher])[0]
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        assert len(allowed), "the grammar failed"
        output.append(int(allowed[-1]))
        matcher.follow(output[-1:])
    return tokenizer.decode(output)[before:]


@pytest.mark.parametrize(
    "content",
    [byte_level_json(), byte_fallback_json(), metaspace_json(), b"", b"{", b'{"normalizer": 3}', b"\xff", b"[]"],
)
def test_a_tokenizer_that_changes_no_text_or_cannot_be_read_stays_as_it_is(content: bytes) -> None:
    assert faithful_tokenizer(content, MOST_TOKENS) == content


def test_stages_behind_the_model_are_found_too() -> None:
    document = {**json.loads(byte_level_json()), "normalizer": {"type": "NFC"}}
    turned = json.dumps(dict(reversed(document.items())), indent=2).encode()
    assert json.loads(faithful_tokenizer(turned, MOST_TOKENS)) == {**document, "normalizer": None}
