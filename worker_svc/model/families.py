"""How each model family spells its shape in config.json, read as `transformers` reads it.

One function per family turns the file into a `ModelConfig`: older and newer keys alike, and for a key that is left
out the default of the family's config class. Only sizes that no default can mean are asked for. What a family can
express and we do not compute is refused by name, never ignored.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from worker_svc.checkpoint import CONFIG_FILE
from worker_svc.checkpoint_error import CheckpointError
from worker_svc.json_file import JsonTable, read_optional_table, read_table, shown
from worker_svc.model.config import Family, ModelConfig
from worker_svc.model.rope import read_rope

GENERATION_FILE = "generation_config.json"
MOST_POSITIONS = 1 << 24
_MOST_VOCAB = 1 << 22
_MOST_WIDTH = 1 << 20
_MOST_LAYERS = 1 << 10
_MOST_HEADS = 1 << 12
_MOST_HEAD_DIM = 1 << 11
_DTYPES = ("float32", "bfloat16", "float16")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_CHOOSE = "choose another checkpoint"

# As `layers.py` computes them, under all names that `transformers` has for the same function.
ACTIVATION_NAMES = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "silu": "silu",
    "swish": "swish",
}


class _Defaults(NamedTuple):
    """What a LLaMA-like family's config class has for keys that are left out."""

    max_positions: int
    num_kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / heads


class _Size(NamedTuple):
    """Sizes that every family has, under its own names."""

    vocab: int
    hidden: int
    layers: int
    heads: int


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
    parse, default_eos = _FAMILIES[architecture]
    generation = read_optional_table(folder, GENERATION_FILE)
    eos: tuple[int, ...] = ()
    if "eos_token_id" in generation:
        eos = generation.ids("eos_token_id", most=_MOST_VOCAB)
    elif "eos_token_id" in raw:
        eos = raw.ids("eos_token_id", most=_MOST_VOCAB)
    elif not raw.is_null("eos_token_id") and default_eos is not None:
        eos = (default_eos,)
    return parse(raw, {"architecture": architecture, "dtype": _dtype(raw), "eos_token_ids": eos})


def _parse_llama(raw: JsonTable, common: dict[str, Any]) -> ModelConfig:
    size = _size(raw)
    if size.hidden % size.heads:
        raw.refuse("hidden_size", f"must be a multiple of num_attention_heads, {size.heads}")
    bias = raw.flag("attention_bias", False)
    return _llama_like(raw, common, _Defaults(2048), qkv_bias=bias, out_bias=bias, mlp_bias=raw.flag("mlp_bias", False))


def _parse_mistral(raw: JsonTable, common: dict[str, Any]) -> ModelConfig:
    window = None if raw.is_null("sliding_window") else raw.whole("sliding_window", 4096, most=MOST_POSITIONS)
    windows = (window,) * _size(raw).layers
    return _llama_like(raw, common, _Defaults(4096 * 32, num_kv_heads=8), sliding_windows=windows)


def _parse_qwen2(raw: JsonTable, common: dict[str, Any]) -> ModelConfig:
    defaults = _Defaults(32_768, num_kv_heads=32)
    return _llama_like(raw, common, defaults, qkv_bias=True, sliding_windows=_qwen_windows(raw))


def _parse_qwen3(raw: JsonTable, common: dict[str, Any]) -> ModelConfig:
    bias = raw.flag("attention_bias", False)
    defaults = _Defaults(32_768, num_kv_heads=32, head_dim=128)
    windows = _qwen_windows(raw)
    return _llama_like(raw, common, defaults, qkv_bias=bias, out_bias=bias, qk_norm=True, sliding_windows=windows)


def _llama_like(raw: JsonTable, common: dict[str, Any], defaults: _Defaults, **differences: Any) -> ModelConfig:
    size = _size(raw)
    max_positions = raw.whole("max_position_embeddings", defaults.max_positions, most=MOST_POSITIONS)
    shape = {
        "family": Family.LLAMA,
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "embed_dim": size.hidden,
        "num_layers": size.layers,
        "num_heads": size.heads,
        "num_kv_heads": _num_kv_heads(raw, size.heads, defaults.num_kv_heads),
        "head_dim": _head_dim(raw, size, defaults.head_dim),
        "intermediate_size": raw.whole("intermediate_size", most=_MOST_WIDTH),
        "max_model_len": max_positions,
        "activation": _activation(raw, "hidden_act", "silu"),
        "gated_mlp": True,
        "rms_norm": True,
        "norm_eps": raw.number("rms_norm_eps", 1e-6, above=0.0, most=1.0),
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        "rope": read_rope(raw, max_positions, MOST_POSITIONS),
        "sliding_windows": (None,) * size.layers,
        "tie_word_embeddings": raw.flag("tie_word_embeddings", False),
    }
    return ModelConfig(**{**shape, **differences, **common})


def _parse_opt(raw: JsonTable, common: dict[str, Any]) -> ModelConfig:
    size = _size(raw)
    bias = raw.flag("enable_bias", True)
    norm_before = raw.flag("do_layer_norm_before", True)
    embed_dim = size.hidden
    if "word_embed_proj_dim" in raw:
        embed_dim = raw.whole("word_embed_proj_dim", most=_MOST_WIDTH)
    return ModelConfig(
        **common,
        family=Family.OPT,
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        embed_dim=embed_dim,
        num_layers=size.layers,
        num_heads=size.heads,
        num_kv_heads=size.heads,
        head_dim=_equal_heads(raw, "hidden_size", size),
        intermediate_size=raw.whole("ffn_dim", most=_MOST_WIDTH),
        max_model_len=raw.whole("max_position_embeddings", 2048, most=MOST_POSITIONS),
        activation=_activation(raw, "activation_function", "relu"),
        gated_mlp=False,
        rms_norm=False,
        norm_eps=1e-5,
        norm_weights=raw.flag("layer_norm_elementwise_affine", True),
        norm_before=norm_before,
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
        own if own in raw or usual not in raw else usual  # `transformers` takes either
        for own, usual in (
            ("n_embd", "hidden_size"),
            ("n_layer", "num_hidden_layers"),
            ("n_head", "num_attention_heads"),
            ("n_positions", "max_position_embeddings"),
        )
    )
    size = _size(raw, hidden=hidden_key, layers=layers_key, heads=heads_key)
    for key, computed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if raw.flag(key, computed) is not computed:
            raw.refuse(key, f"is supported as {str(computed).lower()} only", _CHOOSE)
    inner = 4 * size.hidden
    if "n_inner" in raw:
        inner = raw.whole("n_inner", most=_MOST_WIDTH)
    return ModelConfig(
        **common,
        family=Family.GPT2,
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        embed_dim=size.hidden,
        num_layers=size.layers,
        num_heads=size.heads,
        num_kv_heads=size.heads,
        head_dim=_equal_heads(raw, hidden_key, size),
        intermediate_size=inner,
        max_model_len=raw.whole(positions_key, 1024, most=MOST_POSITIONS),
        activation=_activation(raw, "activation_function", "gelu_new"),
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


# By architecture: how it is read, and its end-of-sequence id where no file says one.
_FAMILIES: dict[str, tuple[Callable[[JsonTable, dict[str, Any]], ModelConfig], int | None]] = {
    "OPTForCausalLM": (_parse_opt, 2),
    "GPT2LMHeadModel": (_parse_gpt2, 50_256),
    "LlamaForCausalLM": (_parse_llama, 2),
    "MistralForCausalLM": (_parse_mistral, 2),
    "Qwen2ForCausalLM": (_parse_qwen2, None),
    "Qwen3ForCausalLM": (_parse_qwen3, None),
}
_ARCHITECTURE_OF_TYPE = {
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


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
        raw.refuse("model_type", f"architectures names {architecture}: let both mean the same")
    return architecture


def _size(
    raw: JsonTable,
    *,
    hidden: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
) -> _Size:
    return _Size(
        vocab=raw.whole("vocab_size", most=_MOST_VOCAB),
        hidden=raw.whole(hidden, most=_MOST_WIDTH),
        layers=raw.whole(layers, most=_MOST_LAYERS),
        heads=raw.whole(heads, most=_MOST_HEADS),
    )


def _equal_heads(raw: JsonTable, hidden_key: str, size: _Size) -> int:
    """The size of a head where heads share the hidden size evenly."""
    if size.hidden % size.heads:
        raw.refuse(hidden_key, f"must be a multiple of the number of heads, {size.heads}")
    return size.hidden // size.heads


def _num_kv_heads(raw: JsonTable, num_heads: int, default: int | None) -> int:
    key = "num_key_value_heads"
    found = num_heads if raw.is_null(key) else raw.whole(key, default or num_heads, most=_MOST_HEADS)
    if num_heads % found:
        raw.refuse(key, f"{num_heads} num_attention_heads cannot share {found} key-value heads evenly")
    return found


def _head_dim(raw: JsonTable, size: _Size, default: int | None) -> int:
    """Even, since rotary embeddings turn pairs of dimensions."""
    found = default or size.hidden // size.heads
    if "head_dim" in raw:
        found = raw.whole("head_dim", most=_MOST_HEAD_DIM)
    if found % 2 or not found:
        raw.refuse("head_dim", f"must be even, and hidden_size / num_attention_heads is {size.hidden} / {size.heads}")
    return found


def _qwen_windows(raw: JsonTable) -> tuple[int | None, ...]:
    """Windows per layer: by `layer_types`, else those from `max_window_layers` on; none unless switched on."""
    num_layers = _size(raw).layers
    window: int | None = None
    if raw.flag("use_sliding_window", False) and not raw.is_null("sliding_window"):
        window = raw.whole("sliding_window", 4096, most=MOST_POSITIONS)
    first = raw.whole("max_window_layers", 28, least=0, most=_MOST_LAYERS)
    types = raw.texts("layer_types")
    if not types:
        types = tuple(_LAYER_TYPES[window is not None and layer >= first] for layer in range(num_layers))
    if set(types) - set(_LAYER_TYPES) or len(types) != num_layers:
        raw.refuse("layer_types", f"must name {' or '.join(_LAYER_TYPES)} for each of {num_layers} layers")
    if window is None and _LAYER_TYPES[1] in types:
        raw.refuse("layer_types", "sliding_attention needs use_sliding_window: true and a sliding_window")
    return tuple(window if kind == _LAYER_TYPES[1] else None for kind in types)


def _dtype(raw: JsonTable) -> str | None:
    key = "dtype" if "dtype" in raw else "torch_dtype"
    if key not in raw:
        return None
    name = raw.text(key).removeprefix("torch.")
    if name not in _DTYPES:
        raw.refuse(key, f"only {', '.join(_DTYPES)} are supported", _CHOOSE)
    return name


def _activation(raw: JsonTable, key: str, default: str) -> str:
    name = raw.text(key, default)
    if name not in ACTIVATION_NAMES:
        raw.refuse(key, f"only {', '.join(ACTIVATION_NAMES)} are supported", _CHOOSE)
    return ACTIVATION_NAMES[name]
