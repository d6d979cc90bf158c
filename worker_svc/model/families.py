"""How each model family spells its shape in config.json.

One function per family turns the file into a `ModelConfig`, with the keys of older and newer checkpoints alike.
What a family can express and we do not compute is refused by name, never ignored.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from worker_svc.checkpoint import CONFIG_FILE, CheckpointError, read_json
from worker_svc.model.config import Family, Llama3Scaling, ModelConfig, RopeConfig
from worker_svc.model.layers import ACTIVATIONS

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_ROPE_THETA = 10_000.0
_LAYER_TYPES = ("full_attention", "sliding_attention")

Raw = Mapping[str, Any]


def read_model_config(folder: Path) -> ModelConfig:
    """Parse config.json, and generation_config.json for the end-of-sequence ids.

    Raises CheckpointError for an architecture, or an option of it, that is not supported.
    """
    raw = read_json(folder / CONFIG_FILE)
    architecture = _architecture(raw)
    parse = _PARSERS.get(architecture)
    if parse is None:
        raise CheckpointError(
            f"{folder} is a {architecture or 'model of unnamed architecture'}, which Quire does not serve: "
            f"choose one of {', '.join(_PARSERS)}"
        )
    _refuse(raw, "quantization_config", (None,), "give the checkpoint in float32, bfloat16 or float16")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    common = {
        "architecture": architecture,
        "dtype": _dtype(raw),
        "bos_token_id": raw.get("bos_token_id"),
        "pad_token_id": raw.get("pad_token_id"),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    }
    return parse(raw, common)


def _parse_llama(raw: Raw, common: Raw) -> ModelConfig:
    return _llama_like(
        raw,
        common,
        qkv_bias=raw.get("attention_bias", False),
        out_bias=raw.get("attention_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
    )


def _parse_mistral(raw: Raw, common: Raw) -> ModelConfig:
    windows = (raw.get("sliding_window"),) * _need(raw, "num_hidden_layers")
    return _llama_like(raw, common, sliding_windows=windows)


def _parse_qwen2(raw: Raw, common: Raw) -> ModelConfig:
    return _llama_like(raw, common, qkv_bias=True, sliding_windows=_qwen_windows(raw))


def _parse_qwen3(raw: Raw, common: Raw) -> ModelConfig:
    bias = raw.get("attention_bias", False)
    return _llama_like(
        {"head_dim": 128, **raw},
        common,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        sliding_windows=_qwen_windows(raw),
    )


def _llama_like(raw: Raw, common: Raw, **differences: Any) -> ModelConfig:
    num_layers, num_heads = _need(raw, "num_hidden_layers"), _need(raw, "num_attention_heads")
    hidden_size = _need(raw, "hidden_size")
    shape = {
        "family": Family.LLAMA,
        "vocab_size": _need(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "embed_dim": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": raw.get("num_key_value_heads") or num_heads,
        "head_dim": raw.get("head_dim") or hidden_size // num_heads,
        "intermediate_size": _need(raw, "intermediate_size"),
        "max_model_len": _need(raw, "max_position_embeddings"),
        "activation": _activation(raw.get("hidden_act", "silu")),
        "gated_mlp": True,
        "rms_norm": True,
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        "rope": _rope(raw),
        "sliding_windows": (None,) * num_layers,
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
    }
    return ModelConfig(**{**shape, **differences, **common})


def _parse_opt(raw: Raw, common: Raw) -> ModelConfig:
    hidden_size, num_heads = _need(raw, "hidden_size"), _need(raw, "num_attention_heads")
    bias = raw.get("enable_bias", True)
    norm_before = raw.get("do_layer_norm_before", True)
    return ModelConfig(
        **common,
        family=Family.OPT,
        vocab_size=_need(raw, "vocab_size"),
        hidden_size=hidden_size,
        embed_dim=raw.get("word_embed_proj_dim") or hidden_size,
        num_layers=_need(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=_need(raw, "ffn_dim"),
        max_model_len=_need(raw, "max_position_embeddings"),
        activation=_activation(raw.get("activation_function", "relu")),
        gated_mlp=False,
        rms_norm=False,
        norm_eps=1e-5,
        norm_weights=raw.get("layer_norm_elementwise_affine", True),
        norm_before=norm_before,
        final_norm=norm_before and not raw.get("_remove_final_layer_norm", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        rope=None,
        position_offset=2,
        sliding_windows=(None,) * _need(raw, "num_hidden_layers"),
        tie_word_embeddings=raw.get("tie_word_embeddings", True),
    )


def _parse_gpt2(raw: Raw, common: Raw) -> ModelConfig:
    hidden_size, num_heads = _need(raw, "n_embd"), _need(raw, "n_head")
    _refuse(raw, "scale_attn_weights", (None, True), "choose a checkpoint without it")
    _refuse(raw, "scale_attn_by_inverse_layer_idx", (None, False), "choose a checkpoint without it")
    _refuse(raw, "add_cross_attention", (None, False), "choose a decoder-only checkpoint")
    return ModelConfig(
        **common,
        family=Family.GPT2,
        vocab_size=_need(raw, "vocab_size"),
        hidden_size=hidden_size,
        embed_dim=hidden_size,
        num_layers=_need(raw, "n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=raw.get("n_inner") or 4 * hidden_size,
        max_model_len=_need(raw, "n_positions"),
        activation=_activation(raw.get("activation_function", "gelu_new")),
        gated_mlp=False,
        rms_norm=False,
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        rope=None,
        sliding_windows=(None,) * _need(raw, "n_layer"),
        tie_word_embeddings=raw.get("tie_word_embeddings", True),
    )


_PARSERS: dict[str, Callable[[Raw, Raw], ModelConfig]] = {
    "OPTForCausalLM": _parse_opt,
    "GPT2LMHeadModel": _parse_gpt2,
    "LlamaForCausalLM": _parse_llama,
    "MistralForCausalLM": _parse_mistral,
    "Qwen2ForCausalLM": _parse_qwen2,
    "Qwen3ForCausalLM": _parse_qwen3,
}
_ARCHITECTURE_OF_TYPE = {
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _architecture(raw: Raw) -> str:
    """The first named architecture; older files name only the model type."""
    named = raw.get("architectures") or []
    model_type = str(raw.get("model_type", ""))
    return str(named[0]) if named else _ARCHITECTURE_OF_TYPE.get(model_type, model_type)


def _rope(raw: Raw) -> RopeConfig:
    """From `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    spelled: Raw = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = spelled.get("rope_type") or spelled.get("type") or "default"
    theta = float(spelled.get("rope_theta") or raw.get("rope_theta") or _DEFAULT_ROPE_THETA)
    partial = spelled.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise CheckpointError(f"{CONFIG_FILE}: partial_rotary_factor {partial} is not supported, only 1")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, linear_factor=float(_need(spelled, "factor")))
    if kind == "llama3":
        original = spelled.get("original_max_position_embeddings") or _need(raw, "max_position_embeddings")
        scaling = Llama3Scaling(
            factor=float(_need(spelled, "factor")),
            low_freq_factor=float(_need(spelled, "low_freq_factor")),
            high_freq_factor=float(_need(spelled, "high_freq_factor")),
            original_max_positions=int(original),
        )
        return RopeConfig(theta=theta, llama3=scaling)
    raise CheckpointError(f"{CONFIG_FILE}: rope type {kind!r} is not supported, only default, linear and llama3")


def _qwen_windows(raw: Raw) -> tuple[int | None, ...]:
    """Windows per layer: by `layer_types`, else those from `max_window_layers` on; none unless switched on."""
    num_layers: int = _need(raw, "num_hidden_layers")
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    window: int | None = raw.get("sliding_window", 4096)
    first = raw.get("max_window_layers", 28)
    types: Sequence[str] = raw.get("layer_types") or [_LAYER_TYPES[layer >= first] for layer in range(num_layers)]
    unknown = sorted(set(types) - set(_LAYER_TYPES))
    if unknown or len(types) != num_layers:
        raise CheckpointError(
            f"{CONFIG_FILE}: layer_types must name {' or '.join(_LAYER_TYPES)} for each of {num_layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _dtype(raw: Raw) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"{CONFIG_FILE}: dtype {name} is not supported, only {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise CheckpointError(f"{CONFIG_FILE}: activation {name!r} is not supported, only {', '.join(ACTIVATIONS)}")
    return name


def _need(raw: Raw, key: str) -> Any:
    if raw.get(key) is None:
        raise CheckpointError(f"{CONFIG_FILE} lacks {key}: download the checkpoint again")
    return raw[key]


def _refuse(raw: Raw, key: str, allowed: Sequence[object], remedy: str) -> None:
    if raw.get(key) not in allowed:
        raise CheckpointError(f"{CONFIG_FILE}: {key} = {raw[key]!r} is not supported: {remedy}")
