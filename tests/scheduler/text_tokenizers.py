"""Small tokenizers of the kinds in use, trained on the spot, and the same ones as transformers sees them."""

import json
from functools import lru_cache

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from scheduler_svc.text.tokenizer import ModelTokenizer

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MARKERS = ["<|im_start|>", "<|im_end|>"]
# Flags of all kinds, and contents that are parts of each other or of plain text.
ADDED_TOKENS = [
    AddedToken("<|left|>", lstrip=True),
    AddedToken("<|right|>", rstrip=True, special=True),
    AddedToken("<|both|>", lstrip=True, rstrip=True, special=True, normalized=False),
    AddedToken("<|a|>", special=True, normalized=False),
    AddedToken("<|a|>b", special=True, normalized=False),
    AddedToken("<|a"),
    AddedToken("dog", single_word=True),
    AddedToken("Fox", single_word=True, normalized=True),
    AddedToken("é", normalized=True),
    AddedToken(" spaced ", normalized=True),
    AddedToken("  ", normalized=False),
    AddedToken("\n\n"),
]
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps.",
    "It was the best of times, it was the worst of times.",
    "Où est la bibliothèque? Die Straße ist naß. Привет, мир! 你好，世界。 こんにちは 👋🏽 👩‍👩‍👧",
    "def add(a, b):\n    return a + b\n",
] * 8


@lru_cache
def byte_level_json() -> bytes:
    """Tokenizer like that of GPT-2 and LLaMA 3: tokens are bytes, a template puts special tokens in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=480,
            special_tokens=[*SPECIAL_TOKENS.values(), *MARKERS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return _with_bos(tokenizer)


@lru_cache
def byte_fallback_json() -> bytes:
    """Tokenizer like that of LLaMA 2 and Mistral: words begin with "▁", unknown characters become byte tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        [each.encode("ascii", "ignore").decode() for each in _CORPUS],
        trainers.BpeTrainer(vocab_size=200, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    known = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(known)},
            [tuple(each) for each in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", *SPECIAL_TOKENS.values(), *MARKERS])
    return _with_bos(tokenizer)


@lru_cache
def metaspace_json() -> bytes:
    """The same with stages of its class since transformers 5: only the first word of a text gets a "▁" of its own."""
    tokenizer = Tokenizer.from_str(json.dumps({**json.loads(byte_fallback_json()), "normalizer": None}))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer.to_str().encode()


@lru_cache
def unigram_json() -> bytes:
    """Tokenizer like those that sentencepiece trains by default: normalised text, unigrams, byte tokens."""
    trained = Tokenizer(models.Unigram())
    trained.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", *SPECIAL_TOKENS.values(), *MARKERS]
    trained.train_from_iterator(
        _CORPUS,
        trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    document = json.loads(trained.to_str())
    document["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    document["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _with_bos(tokenizer)


@lru_cache
def word_piece_json() -> bytes:
    """Tokenizer like that of BERT: lower case, pieces within words begin with "##", no spaces are kept."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["<unk>", *SPECIAL_TOKENS.values(), *MARKERS]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return _with_bos(tokenizer)


def with_added_tokens(tokenizer_json: bytes) -> bytes:
    """The same with `ADDED_TOKENS`."""
    tokenizer = Tokenizer.from_buffer(tokenizer_json)
    tokenizer.add_tokens(ADDED_TOKENS)
    return tokenizer.to_str().encode()


def ours(tokenizer_json: bytes, chat_template: str = "") -> ModelTokenizer:
    return ModelTokenizer(tokenizer_json, chat_template, SPECIAL_TOKENS)


def theirs(tokenizer_json: bytes, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_buffer(tokenizer_json),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS,
    )


def _with_bos(tokenizer: Tokenizer) -> bytes:
    bos = SPECIAL_TOKENS["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer.to_str().encode()


_PLAIN_KINDS = {
    "byte_level": byte_level_json(),
    "byte_fallback": byte_fallback_json(),
    "metaspace": metaspace_json(),
    "unigram": unigram_json(),
    "word_piece": word_piece_json(),
}
ALL_KINDS = {**_PLAIN_KINDS, **{f"{kind}, added": with_added_tokens(content) for kind, content in _PLAIN_KINDS.items()}}
_WRITTEN = [*(token.content for token in ADDED_TOKENS), "<s>", "</s>", "<|im_end|>", "<unk>", "<0x41>", "\u2581"]
MIXED_TEXT = st.lists(
    st.one_of(
        st.sampled_from(_WRITTEN),
        st.sampled_from(["the dog", "b", " ", "Fox", "fox", "doggy", "e\u0301", "\ufb01", "\u3000", "你", "\n"]),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)
