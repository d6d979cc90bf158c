"""Reads config.json of LLaMA and the families with its layout: Mistral, Qwen2, Qwen3, OLMo-2."""

from typing import Any, NamedTuple

from worker_svc.checkpoint.json_file import JsonTable
from worker_svc.model.config import Family, ModelConfig, NormPlace, QkNorm
from worker_svc.model.config_values import (
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_WIDTH,
    ModelSize,
    read_activation,
    read_size,
)
from worker_svc.model.rope import extended_positions, read_rope

FULL_ATTENTION = "full_attention"
_LAYER_TYPES = (FULL_ATTENTION, "sliding_attention")


class _Defaults(NamedTuple):
    """Defaults of a LLaMA-like family's config class for keys that are left out."""

    max_positions: int
    num_kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / heads


def parse_llama(raw: JsonTable, common: dict[str, Any]) -> ModelConfig:
    size = read_size(raw)
    if size.hidden % size.heads:
        raw.refuse("hidden_size", f"must be a multiple of num_attention_heads, {size.heads}")
    bias = raw.flag("attention_bias", False)
    return _llama_like(raw, common, _Defaults(2048), qkv_bias=bias, out_bias=bias, mlp_bias=raw.flag("mlp_bias", False))


def parse_mistral(raw: JsonTable, common: dict[str, Any]) -> ModelConfig:
    if "layer_types" in raw:  # `transformers` reads them, and gives all layers the same window
        raw.refuse("layer_types", "all layers of a Mistral model have the same type", "leave it out")
    if raw.is_null("num_key_value_heads"):
        raw.refuse("num_key_value_heads", "must be a whole number")
    window = None if raw.is_null("sliding_window") else raw.integer("sliding_window", 4096, most=MOST_POSITIONS)
    windows = (window,) * read_size(raw).layers
    return _llama_like(raw, common, _Defaults(4096 * 32, num_kv_heads=8), sliding_windows=windows)


def parse_qwen2(raw: JsonTable, common: dict[str, Any]) -> ModelConfig:
    defaults = _Defaults(32_768, num_kv_heads=32)
    return _llama_like(raw, common, defaults, qkv_bias=True, sliding_windows=_qwen_windows(raw))


def parse_qwen3(raw: JsonTable, common: dict[str, Any]) -> ModelConfig:
    bias = raw.flag("attention_bias", False)
    defaults = _Defaults(32_768, num_kv_heads=32, head_dim=128)
    windows = _qwen_windows(raw)
    return _llama_like(
        raw, common, defaults, qkv_bias=bias, out_bias=bias, qk_norm=QkNorm.HEADS, sliding_windows=windows
    )


def parse_olmo2(raw: JsonTable, common: dict[str, Any]) -> ModelConfig:
    bias = raw.flag("attention_bias", False)
    return _llama_like(
        raw,
        common,
        _Defaults(2048),
        family=Family.OLMO2,
        norm_place=NormPlace.ON_OUTPUT,
        norm_eps=raw.number("rms_norm_eps", 1e-5, above=0.0, most=1.0),
        qk_norm=QkNorm.PROJECTIONS,
        qkv_bias=bias,
        out_bias=bias,
    )


def _llama_like(raw: JsonTable, common: dict[str, Any], defaults: _Defaults, **differences: Any) -> ModelConfig:
    size = read_size(raw)
    max_positions = raw.integer("max_position_embeddings", defaults.max_positions, most=MOST_POSITIONS)
    rope = read_rope(raw, max_positions, MOST_POSITIONS)
    shape = {
        "family": Family.LLAMA,
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "embed_dim": size.hidden,
        "num_layers": size.layers,
        "num_heads": size.heads,
        "num_kv_heads": _num_kv_heads(raw, size.heads, defaults.num_kv_heads),
        "head_dim": _head_dim(raw, size, defaults.head_dim),
        "intermediate_size": raw.integer("intermediate_size", most=MOST_WIDTH),
        "max_model_len": extended_positions(raw, rope, max_positions, MOST_POSITIONS),
        "activation": read_activation(raw, "hidden_act", "silu"),
        "gated_mlp": True,
        "rms_norm": True,
        "norm_eps": raw.number("rms_norm_eps", 1e-6, above=0.0, most=1.0),
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        "rope": rope,
        "sliding_windows": (None,) * size.layers,
        "tie_word_embeddings": raw.flag("tie_word_embeddings", False),
    }
    return ModelConfig(**{**shape, **differences, **common})


def _num_kv_heads(raw: JsonTable, num_heads: int, default: int | None) -> int:
    key = "num_key_value_heads"
    found = num_heads if raw.is_null(key) else raw.integer(key, default or num_heads, most=MOST_HEADS)
    if num_heads % found:
        raw.refuse(key, f"{num_heads} num_attention_heads cannot share {found} key-value heads evenly")
    return found


def _head_dim(raw: JsonTable, size: ModelSize, default: int | None) -> int:
    """The size of a head; must be even, since rotary embeddings rotate pairs of dimensions."""
    found = default or size.hidden // size.heads
    if "head_dim" in raw:
        found = raw.integer("head_dim", most=MOST_HEAD_DIM)
    if found % 2 or not found:
        raw.refuse("head_dim", f"must be even, and hidden_size / num_attention_heads is {size.hidden} / {size.heads}")
    return found


def _qwen_windows(raw: JsonTable) -> tuple[int | None, ...]:
    """Windows per layer: by `layer_types`, else for layers from `max_window_layers` on; none unless switched on."""
    num_layers = read_size(raw).layers
    window: int | None = None
    if raw.flag("use_sliding_window", False) and not raw.is_null("sliding_window"):
        window = raw.integer("sliding_window", 4096, most=MOST_POSITIONS)
    first = raw.integer("max_window_layers", 28, least=0, most=MOST_LAYERS)
    types = raw.texts("layer_types")
    if not types:
        types = tuple(_LAYER_TYPES[window is not None and layer >= first] for layer in range(num_layers))
    if set(types) - set(_LAYER_TYPES) or len(types) != num_layers:
        raw.refuse("layer_types", f"must name {' or '.join(_LAYER_TYPES)} for each of {num_layers} layers")
    if window is None and _LAYER_TYPES[1] in types:
        raw.refuse("layer_types", "sliding_attention needs use_sliding_window: true and a sliding_window")
    return tuple(window if kind == _LAYER_TYPES[1] else None for kind in types)
