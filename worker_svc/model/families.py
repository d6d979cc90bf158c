"""Reads config.json of each model family into a `ModelConfig`, with the semantics of `transformers`.

One function per family accepts older and newer keys, and takes the default of the family's config class for a key that
is left out. Only sizes without a sensible default must be present. An option that is not implemented is refused by
name, never ignored.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.generation_defaults import GENERATION_FILE
from worker_svc.checkpoint.json_file import JsonTable, read_optional_table, read_table, shown
from worker_svc.checkpoint.model_folder import CONFIG_FILE
from worker_svc.model.config import Family, ModelConfig, NormPlace
from worker_svc.model.config_values import (
    CHOOSE,
    MOST_POSITIONS,
    MOST_VOCAB,
    MOST_WIDTH,
    equal_head_dim,
    read_activation,
    read_dtype,
    read_size,
)
from worker_svc.model.llama_families import parse_llama, parse_mistral, parse_olmo2, parse_qwen2, parse_qwen3


def read_model_config(folder: Path) -> ModelConfig:
    """Parse config.json, and generation_config.json for the end-of-sequence ids.

    Raises CheckpointError for an architecture, or an option of it, that is not supported.
    """
    raw = read_table(folder, CONFIG_FILE)
    if raw is None:
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}: give the folder of a Hugging Face checkpoint")
    architecture = _architecture(folder, raw)
    if "quantization_config" in raw:
        raw.refuse("quantization_config", "is not supported", "give the checkpoint in float32, bfloat16 or float16")
    _, parse, default_eos = _FAMILIES[architecture]
    generation = read_optional_table(folder, GENERATION_FILE)
    eos: tuple[int, ...] = ()
    if "eos_token_id" in generation:
        eos = generation.ids("eos_token_id", most=MOST_VOCAB)
    elif "eos_token_id" in raw:
        eos = raw.ids("eos_token_id", most=MOST_VOCAB)
    elif not raw.is_null("eos_token_id") and default_eos is not None:
        eos = (default_eos,)
    config = parse(raw, {"architecture": architecture, "dtype": read_dtype(raw), "eos_token_ids": eos})
    return replace(config, eos_token_ids=tuple(each for each in eos if each < config.vocab_size))


def _parse_opt(raw: JsonTable, common: dict[str, Any]) -> ModelConfig:
    size = read_size(raw)
    bias = raw.flag("enable_bias", True)
    norm_before = raw.flag("do_layer_norm_before", True)
    embed_dim = size.hidden
    if "word_embed_proj_dim" in raw:
        embed_dim = raw.integer("word_embed_proj_dim", most=MOST_WIDTH)
    return ModelConfig(
        **common,
        family=Family.OPT,
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        embed_dim=embed_dim,
        num_layers=size.layers,
        num_heads=size.heads,
        num_kv_heads=size.heads,
        head_dim=equal_head_dim(raw, "hidden_size", size),
        intermediate_size=raw.integer("ffn_dim", most=MOST_WIDTH),
        max_model_len=raw.integer("max_position_embeddings", 2048, most=MOST_POSITIONS),
        activation=read_activation(raw, "activation_function", "relu"),
        gated_mlp=False,
        rms_norm=False,
        norm_eps=1e-5,
        norm_weights=raw.flag("layer_norm_elementwise_affine", True),
        norm_place=NormPlace.BEFORE if norm_before else NormPlace.AFTER_SUM,
        final_norm=norm_before and not raw.flag("_remove_final_layer_norm", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        rope=None,
        position_offset=2,
        sliding_windows=(None,) * size.layers,
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
    )


def _parse_gpt2(raw: JsonTable, common: dict[str, Any]) -> ModelConfig:
    hidden_key, layers_key, heads_key, positions_key = (
        own if own in raw or usual not in raw else usual  # `transformers` accepts either
        for own, usual in (
            ("n_embd", "hidden_size"),
            ("n_layer", "num_hidden_layers"),
            ("n_head", "num_attention_heads"),
            ("n_positions", "max_position_embeddings"),
        )
    )
    size = read_size(raw, hidden=hidden_key, layers=layers_key, heads=heads_key)
    for key, computed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if raw.flag(key, computed) is not computed:
            raw.refuse(key, f"is supported as {str(computed).lower()} only", CHOOSE)
    inner = 4 * size.hidden
    if "n_inner" in raw:
        inner = raw.integer("n_inner", most=MOST_WIDTH)
    return ModelConfig(
        **common,
        family=Family.GPT2,
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        embed_dim=size.hidden,
        num_layers=size.layers,
        num_heads=size.heads,
        num_kv_heads=size.heads,
        head_dim=equal_head_dim(raw, hidden_key, size),
        intermediate_size=inner,
        max_model_len=raw.integer(positions_key, 1024, most=MOST_POSITIONS),
        activation=read_activation(raw, "activation_function", "gelu_new"),
        gated_mlp=False,
        rms_norm=False,
        norm_eps=raw.number("layer_norm_epsilon", 1e-5, above=0.0, most=1.0),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        rope=None,
        sliding_windows=(None,) * size.layers,
        tie_word_embeddings=raw.flag("tie_word_embeddings", True),
    )


# By architecture: its model type, its parser, and the end-of-sequence id if no file has one.
_FAMILIES: dict[str, tuple[str, Callable[[JsonTable, dict[str, Any]], ModelConfig], int | None]] = {
    "OPTForCausalLM": ("opt", _parse_opt, 2),
    "GPT2LMHeadModel": ("gpt2", _parse_gpt2, 50_256),
    "LlamaForCausalLM": ("llama", parse_llama, 2),
    "MistralForCausalLM": ("mistral", parse_mistral, 2),
    "Qwen2ForCausalLM": ("qwen2", parse_qwen2, None),
    "Qwen3ForCausalLM": ("qwen3", parse_qwen3, None),
    "Olmo2ForCausalLM": ("olmo2", parse_olmo2, 50_279),
}
_ARCHITECTURE_OF_TYPE = {model_type: architecture for architecture, (model_type, *_) in _FAMILIES.items()}


def _architecture(folder: Path, raw: JsonTable) -> str:
    """The first named architecture; older files name only the model type."""
    named = raw.texts("architectures")
    model_type = raw.text("model_type", "") if "model_type" in raw else ""
    of_type = _ARCHITECTURE_OF_TYPE.get(model_type)
    architecture = named[0] if named else of_type
    if architecture not in _FAMILIES:
        name = shown(architecture or model_type) if architecture or model_type else "model of unnamed architecture"
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: architectures names a {name}, which Quire does not serve: "
            f"choose one of {', '.join(_FAMILIES)}"
        )
    if of_type not in (None, architecture):
        raw.refuse("model_type", f"architectures names {architecture}: both must name the same family")
    return architecture
