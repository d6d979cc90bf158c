"""Tiny random checkpoints of every family, written by `transformers`, and its greedy answers to compare with.

All parameters are random, norms and biases too, so that none can be left out unnoticed, and matrices are large
enough that greedy choices are rarely near-tied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 211
MAX_POSITIONS = 256
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA_SHAPE: dict[str, Any] = {**_SHAPE, "intermediate_size": 112, "tie_word_embeddings": False}


def _llama(**options: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_LLAMA_SHAPE, **options}))


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_theta": 10_000.0, **parameters}


# By name: a fresh, randomly initialised model. Windows are smaller than the sequences of the tests.
TINY_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "opt": lambda: OPTForCausalLM(OPTConfig(**_SHAPE, ffn_dim=112)),
    "opt_350m_style": lambda: OPTForCausalLM(
        OPTConfig(**_SHAPE, ffn_dim=112, do_layer_norm_before=False, word_embed_proj_dim=32)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=3, n_head=4, n_positions=MAX_POSITIONS, eos_token_id=2)
    ),
    "llama_mha": _llama,
    "llama_gqa": lambda: _llama(num_key_value_heads=2, rms_norm_eps=1e-2),
    "llama_mqa": lambda: _llama(num_key_value_heads=1, tie_word_embeddings=True),
    "llama_biases": lambda: _llama(num_key_value_heads=2, attention_bias=True, mlp_bias=True, head_dim=24),
    "llama_linear_rope": lambda: _llama(rope_parameters=_rope(rope_type="linear", factor=4.0)),
    "llama3_rope": lambda: _llama(
        num_key_value_heads=2,
        rope_parameters=_rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama_yarn": lambda: _llama(
        num_key_value_heads=2,
        rope_parameters=_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_LLAMA_SHAPE, num_key_value_heads=2, sliding_window=21)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_LLAMA_SHAPE, num_key_value_heads=2)),
    "qwen2_window": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **_LLAMA_SHAPE, num_key_value_heads=2, use_sliding_window=True, sliding_window=21, max_window_layers=1
        )
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_LLAMA_SHAPE, num_key_value_heads=2, head_dim=32)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**_LLAMA_SHAPE, num_key_value_heads=2)),
}

_ODD: dict[str, Any] = {"hidden_size": 70, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 77}
# Of sizes that are no powers of two: heads of 6, 13, 14 and 22, of which 5 or 7 share one head of keys and values.
ODD_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama_5_heads_of_14": lambda: _llama(**_ODD, attention_bias=True, tie_word_embeddings=True),
    "llama_7_heads_of_6": lambda: _llama(**{**_ODD, "hidden_size": 42, "num_attention_heads": 7}, mlp_bias=True),
    "llama_yarn_by_its_own_factor": lambda: _llama(
        **_ODD,
        rope_parameters=_rope(
            rope_type="yarn", factor=2.5, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.1
        ),
    ),
    "llama_dynamic_rope": lambda: _llama(**_ODD, rope_parameters=_rope(rope_type="dynamic", factor=2.0)),
    "mistral_window_of_a_block_and_yarn": lambda: MistralForCausalLM(
        MistralConfig(
            **{**_LLAMA_SHAPE, **_ODD},
            head_dim=22,
            sliding_window=16,
            rope_parameters=_rope(rope_type="yarn", factor=3.0, original_max_position_embeddings=100),
        )
    ),
    "qwen2_windows_by_layer": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **{**_LLAMA_SHAPE, **_ODD},
            use_sliding_window=True,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
    "llama_heads_of_64": lambda: _llama(num_key_value_heads=2, head_dim=64),  # as libraries of attention take them
    "gpt2_heads_of_13": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB_SIZE, n_embd=39, n_layer=2, n_head=3, n_positions=MAX_POSITIONS, n_inner=50, eos_token_id=2
        )
    ),
}


def write_tiny_model(family: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint, the same for the same seed, and return the folder."""
    model = (TINY_MODELS | ODD_MODELS)[family]()
    randomise(model, seed)
    nn.Module.to(model, dtype)
    model.save_pretrained(folder)
    return folder


def randomise(model: PreTrainedModel, seed: int = 0) -> None:
    """Set all parameters to random values, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.2 * noise if parameter.dim() == 1 else noise * _std(name))


def _std(name: str) -> float:
    """Standard deviation of a matrix, such that positions and prompts matter and the best logits lie well apart."""
    if "lm_head" in name or "wpe" in name or "embed_positions" in name:
        return 1.0
    return 0.3 if "embed" in name or "wte" in name else 0.2


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Token ids above the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True, slots=True)
class GreedyReference:
    """Output of `transformers` for each prompt alone, with its margins."""

    tokens: list[list[int]]
    margins: list[list[float]]  # gap of the top two logits at each token


def reference_greedy(folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> GreedyReference:
    """Greedy tokens in float32, each prompt alone and unpadded, never ending early."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    tokens, margins = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(result.sequences[0, len(prompt) :].tolist())
        best_two = torch.cat(result.logits).float().topk(2).values
        margins.append((best_two[:, 0] - best_two[:, 1]).tolist())
    return GreedyReference(tokens, margins)
