"""Values read from config.json: both spellings, every family, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.worker.tiny_models import write_tiny_model
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.model.config import Family, ModelConfig, NormPlace
from worker_svc.model.decoder import load_decoder
from worker_svc.model.families import read_model_config
from worker_svc.model.layers import inverse_frequencies

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _read(folder: Path, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(folder)


def _refusal(folder: Path, raw: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        _read(folder, raw)
    return str(caught.value)


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 4.0}, LLAMA3_ROPE])
def test_older_and_newer_keys_mean_the_same(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    older = {**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    parameters = {("rope_type" if key == "type" else key): value for key, value in (scaling or {}).items()}
    newer = {**LLAMA, "rope_parameters": {"rope_theta": 5e5, **parameters}, "dtype": "bfloat16"}
    config = _read(tmp_path, older)
    assert config == _read(tmp_path, newer)
    assert config.dtype == "bfloat16"
    assert config.rope is not None
    assert config.rope.theta == 5e5


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),  # as Qwen2.5 documents it
        ({"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 33}, 128),
        ({"type": "yarn", "factor": 4.03, "original_max_position_embeddings": 33}, 132),
        ({"type": "yarn", "factor": None, "original_max_position_embeddings": 32}, 128),
        ({"type": "yarn", "factor": 4.0}, 128),
        ({"type": "linear", "factor": 4.0}, 128),
        ({"type": "dynamic", "factor": 4.0}, 128),
        ({**LLAMA3_ROPE, "original_max_position_embeddings": 128}, 128),
    ],
)
def test_yarn_serves_the_length_that_it_is_for(scaling: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert _read(tmp_path, {**LLAMA, "rope_scaling": scaling}).max_model_len == expected


def test_an_original_length_beside_the_scaling_counts_and_an_endless_one_is_refused(tmp_path: Path) -> None:
    raw = {**LLAMA, "original_max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 3.0}}
    assert _read(tmp_path, raw).max_model_len == 192
    assert "factor is 1000000.0" in _refusal(tmp_path, {**raw, "rope_scaling": {"type": "yarn", "factor": 1e6}})


def test_what_is_left_out_has_the_usual_value(tmp_path: Path) -> None:
    config = _read(tmp_path, LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.dtype) == (4, 16, None)
    assert config.rope is not None
    assert config.rope.theta == 10_000.0
    assert config.sliding_windows == (None,) * 4
    assert not config.tie_word_embeddings


def test_the_model_type_stands_in_for_a_missing_architecture(tmp_path: Path) -> None:
    raw = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 32}
    del raw["architectures"]
    config = _read(tmp_path, raw)
    assert config.architecture == "MistralForCausalLM"
    assert config.sliding_windows == (32,) * 4


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (None, None, ()),
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        (2, {"temperature": 0.6}, (2,)),
    ],
)
def test_end_of_sequence_ids_come_from_either_file(
    eos: object, generation: dict[str, Any] | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert _read(tmp_path, {**LLAMA, "eos_token_id": eos}, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (None, None, None, None)),
        ({"sliding_window": 9}, (None, None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, (None, None, None, 9)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
    ],
)
def test_qwen_windows_are_per_layer_and_only_when_switched_on(
    options: dict[str, Any], expected: tuple[int | None, ...], tmp_path: Path
) -> None:
    config = _read(tmp_path, {**QWEN2, **options})
    assert config.sliding_windows == expected
    assert (config.qkv_bias, config.out_bias) == (True, False)


def test_opt_says_where_it_normalises_and_projects(tmp_path: Path) -> None:
    raw = {**LLAMA, "architectures": ["OPTForCausalLM"], "ffn_dim": 96}
    usual = _read(tmp_path, raw)
    assert (usual.family, usual.position_offset, usual.embed_dim) == (Family.OPT, 2, 64)
    assert usual.norm_place is NormPlace.BEFORE
    assert usual.final_norm
    other = _read(tmp_path, {**raw, "do_layer_norm_before": False, "word_embed_proj_dim": 32})
    assert other.embed_dim == 32
    assert other.norm_place is NormPlace.AFTER_SUM
    assert not other.final_norm


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ("MambaForCausalLM", "LlamaForCausalLM", "GPT2LMHeadModel")),
        ({"architectures": None, "model_type": "bert"}, ("bert", "OPTForCausalLM")),
        ({"architectures": None}, ("unnamed", "Qwen3ForCausalLM")),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ("longrope", "llama3", "yarn")),
        ({"rope_scaling": {"type": "su", "factor": 4.0}}, ("rope_scaling: type", "su", "linear")),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, ("rope_parameters: full_attention", "layer")),
        ({"model_type": "mistral"}, ("model_type", "mistral", "LlamaForCausalLM")),
        ({"model_type": "granite", "residual_multiplier": 0.2}, ("model_type", "granite", "LlamaForCausalLM")),
        ({"is_causal": False}, ("is_causal", "false", "causal attention")),
        ({"per_layer_config": {"1": {"hidden_act": "relu"}}}, ("per_layer_config", "layers")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"hidden_act": "mish"}, ("mish", "silu")),
        ({"dtype": "float8_e4m3fn"}, ("float8_e4m3fn", "bfloat16")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "bfloat16")),
        ({"hidden_size": None}, ("hidden_size is null",)),
        ({"num_key_value_heads": 3}, ("num_key_value_heads",)),
        (
            {**QWEN2, "use_sliding_window": True, "layer_types": ["chunked"] * 4},
            ("layer_types", "sliding_attention"),
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    change: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    message = _refusal(tmp_path, {**LLAMA, **change})
    for word in words:
        assert word in message


GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 9, "n_embd": 8, "n_head": 2, "n_layer": 4}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 4, "sliding_window": None}
OLMO2 = {**LLAMA, "architectures": ["Olmo2ForCausalLM"]}
KINDS = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize("raw", [LLAMA, OLMO2, GPT2], ids=["llama", "olmo2", "gpt2"])
@pytest.mark.parametrize(
    "change",
    [{"sliding_window": 8}, {"attention_chunk_size": 8}, {"layer_types": KINDS, "sliding_window": 8}],
    ids=lambda change: next(iter(change)),
)
def test_windows_that_only_the_cache_of_transformers_obeys_are_refused(
    raw: dict[str, Any], change: dict[str, Any], tmp_path: Path
) -> None:
    assert f"{next(iter(change))} is " in _refusal(tmp_path, {**raw, **change})


def test_chunks_of_attention_are_refused_where_a_family_has_windows_alone(tmp_path: Path) -> None:
    assert "attention_chunk_size is 8" in _refusal(tmp_path, {**MISTRAL, "attention_chunk_size": 8})


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": None, "attention_chunk_size": None, "layer_types": None},
        {"sliding_window": 128, "attention_chunk_size": 4096},  # beyond all positions
        {"sliding_window": 8, "layer_types": ["full_attention"] * 4},
    ],
)
def test_windows_without_effect_are_served(change: dict[str, Any], tmp_path: Path) -> None:
    assert _read(tmp_path, {**LLAMA, **change}).sliding_windows == (None,) * 4


@pytest.mark.parametrize(
    ("files", "named", "is_served"),
    [
        (["model.safetensors"], "model.safetensors", True),
        (["model.safetensors", "x.safetensors"], "x.safetensors", False),
        (["model.safetensors"], "gone.safetensors", False),
        (["x.safetensors"], "x.safetensors", True),
        (["x.safetensors", "y.safetensors"], "x.safetensors", False),
        (["model.safetensors"], None, True),
    ],
)
def test_other_weights_than_those_that_the_config_names_are_not_served(
    files: list[str], named: str | None, is_served: bool, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    raw = {**LLAMA, "transformers_weights": named}
    if is_served:
        assert _read(tmp_path, raw).num_layers == 4
    else:
        assert f'transformers_weights is "{named}"' in _refusal(tmp_path, raw)


def test_two_keys_of_gpt2_that_mean_the_same_must_be_equal(tmp_path: Path) -> None:
    raw = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 9, "n_embd": 8, "n_head": 2, "n_layer": 1}
    assert _read(tmp_path, {**raw, "num_attention_heads": 2}).num_heads == 2
    message = _refusal(tmp_path, {**raw, "num_attention_heads": 4})
    assert "num_attention_heads is 4" in message
    assert "n_head" in message


def test_gpt2_options_that_change_attention_are_refused(tmp_path: Path) -> None:
    raw = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 9, "n_embd": 8, "n_head": 2, "n_layer": 1}
    raw |= {"n_positions": 16, "scale_attn_by_inverse_layer_idx": True}
    assert "scale_attn_by_inverse_layer_idx" in _refusal(tmp_path, raw)


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, LLAMA3_ROPE])
def test_scaled_frequencies_equal_those_of_transformers(scaling: dict[str, Any], tmp_path: Path) -> None:
    parameters = {"rope_theta": 10_000.0, **scaling}
    config = _read(tmp_path, {**LLAMA, "rope_parameters": parameters})
    assert config.rope is not None
    theirs = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    ours = inverse_frequencies(config.rope, config.head_dim, torch.device("cpu"))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0.0)


def test_far_positions_keep_their_angles_in_half_precision(tmp_path: Path) -> None:
    decoder = load_decoder(write_tiny_model("llama_gqa", tmp_path), torch.bfloat16, torch.device("cpu"))
    assert decoder.inverse_frequencies is not None
    far = 40_099  # bfloat16 counts exactly up to 256 only
    angles = far * decoder.inverse_frequencies.double()
    table = torch.empty(2, 50_000, len(angles))
    decoder.write_rotary(*table)
    for found, expected in zip(table, (angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(found[far].double(), expected, rtol=0.0, atol=5e-3)
