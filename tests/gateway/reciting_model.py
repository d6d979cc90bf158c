"""A tiny model that recites: the last token of its prompt names an answer, and each of its tokens the next one.

Its answers are cut into tokens that occur once, and its weights are a table from each token to the next, in the form of
a LLaMA without attention.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "</s>"
_SURE = 50.0  # so much above the others is the logit of the next token


def cue(name: str) -> str:
    """The token behind which the model recites an answer."""
    return f"※{name}※"  # a sign that no answer has: the tokens of one match within a prompt, too


def write_reciting_model(
    folder: Path, answers: Mapping[str, Sequence[str]], chat_template: str, special_tokens: Sequence[str] = ()
) -> None:
    """Write a model of these answers by cue token, each in parts.

    Parts that are special tokens occur once in all answers; a cue may be one.
    """
    chains = _chains(answers, special_tokens)
    pieces = [each for chain in chains.values() for each in chain if each not in special_tokens]
    tokenizer = _tokenizer([*answers, *special_tokens], pieces)
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    following = torch.zeros(size, size)
    for begin, chain in chains.items():
        ids = [tokenizer.token_to_id(each) for each in (begin, *chain, EOS)]
        following[ids[1:], ids[:-1]] = _SURE
    eos_token_id = tokenizer.token_to_id(EOS)
    assert eos_token_id is not None
    _write_weights(folder, following, eos_token_id)
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=EOS, chat_template=chat_template
    ).save_pretrained(folder)


def _chains(answers: Mapping[str, Sequence[str]], special_tokens: Sequence[str]) -> dict[str, list[str]]:
    """Tokens of each answer; none occurs twice."""
    rng, used = random.Random(1), {*pre_tokenizers.ByteLevel.alphabet(), *answers, *special_tokens}
    return {
        begin: [piece for part in parts for piece in ([part] if part in special_tokens else _cut(part, used, rng))]
        for begin, parts in answers.items()
    }


def _cut(text: str, used: set[str], rng: random.Random) -> list[str]:
    pieces: list[str] = []
    begin = 0
    while begin < len(text):
        end = begin + rng.randint(2, 5)
        while text[begin:end] in used and end < len(text):
            end += 1
        piece = text[begin:end]
        while piece in used or len(piece) == 1:  # the last one grows forwards no more
            piece = pieces.pop() + piece
        pieces.append(piece)
        used.add(piece)
        begin = end
    return pieces


def _tokenizer(special_tokens: Sequence[str], pieces: Sequence[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, *special_tokens])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in pieces])
    return tokenizer


def _write_weights(folder: Path, following: torch.Tensor, eos_token_id: int) -> None:
    size = len(following)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.norm.weight.fill_(size**-0.5)  # of an embedding, which has one 1, nothing is left but that
        model.lm_head.weight.copy_(following)
    model.save_pretrained(folder)
