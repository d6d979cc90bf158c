"""ModelTokenizer against transformers, on vocabularies of all kinds and with added tokens of all flags."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from quire.errors import FailedPreconditionError, InvalidRequestError
from quire.v1 import inference_pb2 as pb
from quire.wire_chat import chat_to_pb
from scheduler_svc.requests.params.chat_prompt import encode_chat
from scheduler_svc.text.tokenizer import ModelTokenizer
from tests.scheduler.text_tokenizers import ALL_KINDS, MIXED_TEXT, byte_fallback_json, byte_level_json, ours, theirs

KINDS = {"byte_level": byte_level_json(), "byte_fallback": byte_fallback_json()}
TEXTS = [
    "",
    " ",
    "The quick brown fox",
    "  two spaces, and a trailing one ",
    "<s>It was</s> the best",
    "<|im_start|>user\nHello<|im_end|>\n",
    "naïve 你好 👩‍👩‍👧 \x00 \u200d é",
]
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who sleeps? 你好"},
]


@pytest.fixture(params=KINDS)
def tokenizer_json(request: pytest.FixtureRequest) -> bytes:
    return KINDS[request.param]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_text_is_encoded_as_transformers_does(tokenizer_json: bytes, text: str, add_special_tokens: bool) -> None:
    expected = theirs(tokenizer_json).encode(text, add_special_tokens=add_special_tokens)
    assert ours(tokenizer_json).encode(text, add_special_tokens) == expected


@settings(max_examples=400)
@given(
    text=st.one_of(st.text(max_size=40), MIXED_TEXT),
    kind=st.sampled_from(sorted(ALL_KINDS)),
    add_special_tokens=st.booleans(),
    keep_special_tokens=st.booleans(),
)
def test_any_text_makes_the_round_trip_that_transformers_makes(
    text: str, kind: str, add_special_tokens: bool, keep_special_tokens: bool
) -> None:
    tokenizer, reference = OURS[kind], THEIRS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens)
    assert token_ids == reference.encode(text, add_special_tokens=add_special_tokens)
    decoded = tokenizer.decode(token_ids, keep_special_tokens)
    assert decoded == reference.decode(token_ids, skip_special_tokens=not keep_special_tokens)


@settings(max_examples=150)
@given(st.data(), st.sampled_from(sorted(ALL_KINDS)), st.booleans())
def test_any_token_ids_are_decoded_as_transformers_does(
    data: st.DataObject, kind: str, keep_special_tokens: bool
) -> None:
    reference = THEIRS[kind]
    token_ids = data.draw(st.lists(st.integers(0, len(reference) - 1), max_size=30))
    expected = reference.decode(token_ids, skip_special_tokens=not keep_special_tokens)
    assert OURS[kind].decode(token_ids, keep_special_tokens) == expected


def test_special_tokens_are_left_out_of_text_unless_kept(tokenizer_json: bytes) -> None:
    tokenizer = ours(tokenizer_json)
    token_ids = tokenizer.encode("the dog<|im_end|>", True)
    assert tokenizer.decode(token_ids, False) == "the dog"
    assert tokenizer.decode(token_ids, True) in ("<s>the dog<|im_end|>", "<s> the dog<|im_end|>")


def test_a_chat_is_encoded_as_transformers_does_with_one_beginning_of_sequence_token(tokenizer_json: bytes) -> None:
    tokenizer = ours(tokenizer_json, CHAT)
    for add_generation_prompt in (True, False):
        expected = theirs(tokenizer_json, CHAT).apply_chat_template(
            MESSAGES, add_generation_prompt=add_generation_prompt, return_dict=False
        )
        token_ids = tokenizer.encode_chat(MESSAGES, add_generation_prompt)
        assert token_ids == expected
        assert tokenizer.tokens(token_ids).count("<s>") == 1


def test_the_answer_of_a_chat_is_opened_unless_the_chat_says_otherwise(tokenizer_json: bytes) -> None:
    tokenizer = ours(tokenizer_json, CHAT)
    chat = chat_to_pb(MESSAGES)
    assert encode_chat(tokenizer, chat) == tokenizer.encode_chat(MESSAGES, True)
    chat.add_generation_prompt = False
    assert encode_chat(tokenizer, chat) == tokenizer.encode_chat(MESSAGES, False)
    continued = pb.ChatPrompt(messages=chat.messages, continue_final_message=True)
    assert encode_chat(tokenizer, continued) == tokenizer.encode_chat(MESSAGES, False, True)


@settings(max_examples=100)
@given(
    contents=st.lists(MIXED_TEXT, min_size=1, max_size=3),
    kind=st.sampled_from(sorted(ALL_KINDS)),
    continue_final_message=st.booleans(),
)
def test_any_chat_is_encoded_as_transformers_does(contents: list[str], kind: str, continue_final_message: bool) -> None:
    messages = [{"role": "user", "content": each} for each in contents]
    expected = THEIRS[kind].apply_chat_template(
        messages, chat_template=CHAT, continue_final_message=continue_final_message, return_dict=False
    )
    assert OURS[kind].encode_chat(messages, False, continue_final_message) == expected


def test_a_model_without_chat_template_refuses_chats() -> None:
    tokenizer = ours(byte_level_json())
    assert not tokenizer.has_chat_template
    with pytest.raises(FailedPreconditionError, match="send the prompt as text"):
        tokenizer.encode_chat(MESSAGES, True)


def test_truncation_and_padding_in_the_file_are_for_training_and_not_obeyed() -> None:
    tokenizer = Tokenizer.from_buffer(byte_level_json())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100, pad_token="<s>")
    text = "It was the best of times, it was the worst of times."
    assert ours(tokenizer.to_str().encode()).encode(text, True) == ours(byte_level_json()).encode(text, True)


def test_text_that_is_not_unicode_is_refused(tokenizer_json: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogates") as caught:
        ours(tokenizer_json).encode("half \ud83d an emoji", True)
    assert [each.field for each in caught.value.violations] == ["text"]
    with pytest.raises(InvalidRequestError, match="lone surrogates") as caught:
        ours(tokenizer_json, "{{ '\\udc4b' }}").encode_chat(MESSAGES, True)
    assert [each.field for each in caught.value.violations] == ["chat"]


def test_text_that_the_vocabulary_cannot_spell_is_refused() -> None:
    tokenizer = ours(Tokenizer(models.WordLevel({"yes": 0}, unk_token="?")).to_str().encode())
    assert tokenizer.encode("yes", False) == [0]
    with pytest.raises(InvalidRequestError, match="cannot be encoded"):
        tokenizer.encode("no", False)


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    tokenizer = ours(byte_level_json())
    (known,) = tokenizer.encode("t", False)
    assert tokenizer.decode([known, 10_000_000, known], False) == "tt"
    assert tokenizer.tokens([known, 10_000_000]) == ["t", ""]
    with pytest.raises(InvalidRequestError, match="negative"):
        tokenizer.decode([-1], False)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", json.dumps({"model": {"type": "None"}}).encode()])
def test_a_file_that_is_no_tokenizer_says_so(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        ModelTokenizer(content, "", {})


def test_threads_share_a_tokenizer(tokenizer_json: bytes) -> None:
    tokenizer = ours(tokenizer_json)
    texts = [f"{text} {i}" for i in range(40) for text in TEXTS]
    expected = [tokenizer.encode(each, True) for each in texts]
    with ThreadPoolExecutor(4) as executor:
        assert list(executor.map(lambda text: tokenizer.encode(text, True), texts)) == expected


OURS = {kind: ours(content, CHAT) for kind, content in ALL_KINDS.items()}
THEIRS = {kind: theirs(content) for kind, content in ALL_KINDS.items()}
