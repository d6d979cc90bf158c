"""Small tokenizers of the two kinds in use, trained on the spot, and the same ones as transformers sees them."""

import json
from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from scheduler_svc.text.tokenizer import ModelTokenizer

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MARKERS = ["<|im_start|>", "<|im_end|>"]
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
