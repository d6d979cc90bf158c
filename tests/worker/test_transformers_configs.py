"""config.json as `transformers` reads it: each key left out, and odd values, give its logits or a refusal by name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.worker.paged_runner import PagedRunner, PagedSequence, forward_batch, reference_logits
from tests.worker.tiny_models import TINY_MODELS, random_prompts, randomise
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.model.config import ModelConfig
from worker_svc.model.decoder import load_decoder
from worker_svc.model.families import read_model_config

CPU = torch.device("cpu")
FAMILIES = ("opt_350m_style", "gpt2", "llama_gqa", "mistral", "qwen2_window", "qwen3", "olmo2")
NUM_TOKENS = 70
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

ROPE: list[dict[str, Any]] = [
    {"rope_parameters": {"rope_theta": 500.0}},
    {"rope_parameters": None, "rope_theta": 500.0},
    {"rope_parameters": {"rope_theta": 500.0}, "rope_theta": 7.0},
    {"rope_parameters": {"rope_theta": 500.0}, "rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}, "rope_scaling": {"type": "default"}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}, "rope_scaling": {}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}, "rope_scaling": None},
    {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 99.0},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "dynamic"}},
    {"rope_parameters": {"rope_type": "linear"}},
    {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "proportional"}},
    {"rope_parameters": {"rope_type": 7}},
    {"rope_parameters": YARN},
    {"rope_parameters": {**YARN, "original_max_position_embeddings": None}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    {"rope_parameters": {**YARN, "factor": None}},
    {"rope_parameters": {**YARN, "attention_factor": 1.7}},
    {"rope_parameters": {**YARN, "attention_factor": None}},
    {"rope_parameters": {**YARN, "beta_fast": 8, "beta_slow": 2}},
    {"rope_parameters": {**YARN, "beta_fast": None, "beta_slow": None}},
    {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    {"rope_parameters": {**YARN, "mscale": 0.7}},
    {"rope_parameters": {**YARN, "truncate": False}},
    {"rope_parameters": {**YARN, "rope_theta": 50.0}},
    {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    {"head_dim": 24},
    {"head_dim": 17},
    {"num_key_value_heads": None},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 3},
    {"hidden_act": "gelu"},
    {"hidden_act": "relu"},
    {"hidden_act": "gelu_pytorch_tanh"},
    {"hidden_act": "gelu_fast"},
    {"hidden_act": "mish"},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"rms_norm_eps": 0.05},
    {"tie_word_embeddings": True},
]
WINDOWS: list[dict[str, Any]] = [
    {"sliding_window": None},
    {"sliding_window": 9},
    {"use_sliding_window": False},
    {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 9, "layer_types": None, "max_window_layers": 2},
    {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"] * 2},
    {
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
]
OPT: list[dict[str, Any]] = [
    {"do_layer_norm_before": True},
    {"do_layer_norm_before": True, "_remove_final_layer_norm": True},
    {"word_embed_proj_dim": None},
    {"word_embed_proj_dim": 64},
    {"enable_bias": False},
    {"layer_norm_elementwise_affine": False},
    {"activation_function": "gelu"},
    {"activation_function": "gelu_new"},
    {"activation_function": "tanh"},
    {"tie_word_embeddings": False},
    {"num_attention_heads": 5},
]
GPT2: list[dict[str, Any]] = [
    {"n_inner": 48},
    {"n_inner": None},
    {"activation_function": "relu"},
    {"activation_function": "gelu_python"},
    {"activation_function": "gelu_accurate"},
    {"activation_function": "gelu_python_tanh"},
    {"layer_norm_epsilon": 0.1},
    {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True},
    {"reorder_and_upcast_attn": True},
    {"add_cross_attention": True},
    {"tie_word_embeddings": False},
    {"n_head": 5},
    {"n_head": 8},
]
ODD = {
    "opt_350m_style": OPT,
    "gpt2": GPT2,
    **dict.fromkeys(("llama_gqa", "olmo2"), ROPE),
    **dict.fromkeys(("mistral", "qwen2_window", "qwen3"), ROPE + WINDOWS),
}
# Keys without which `transformers` reads no config, or that it does not read itself.
OF_THE_FILE = {"transformers_version", "use_cache", "model_type"}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def config_of(family: str) -> dict[str, Any]:
    """Config of a family, as it is saved."""
    raw: dict[str, Any] = TINY_MODELS[family]().config.to_diff_dict()
    return raw


def left_out() -> Iterator[tuple[str, str]]:
    for family in FAMILIES:
        config = TINY_MODELS[family]().config.to_dict()
        for key in sorted(set(config) - OF_THE_FILE):
            yield family, key


@pytest.mark.long
@pytest.mark.parametrize(("family", "key"), list(left_out()))
def test_a_key_that_is_left_out_means_what_it_means_to_transformers(family: str, key: str, tmp_path: Path) -> None:
    raw: dict[str, Any] = TINY_MODELS[family]().config.to_dict()
    raw["architectures"] = [type(TINY_MODELS[family]()).__name__]
    if key == "layer_types":  # which would win over what it comes from
        raw["max_window_layers"] = 2
    del raw[key]
    check(raw, (key,), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "change"), [(family, change) for family, changes in ODD.items() for change in changes]
)
def test_an_odd_value_means_what_it_means_to_transformers(family: str, change: dict[str, Any], tmp_path: Path) -> None:
    raw = {**config_of(family), "architectures": [type(TINY_MODELS[family]()).__name__]}
    if "layer_types" not in change:
        raw.pop("layer_types", None)
    keys = [*change, *(key for value in change.values() if isinstance(value, dict) for key in value)]
    check({**raw, **change}, (*keys, "factor", "rope_type", "high_freq_factor", "hidden_size", "n_embd"), tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "llama_gqa"])
def test_yarn_beyond_max_position_embeddings_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 1e4}
    raw = {**config_of(family), "architectures": [type(TINY_MODELS[family]()).__name__]}
    write(tmp_path, {**raw, "max_position_embeddings": 24, "rope_parameters": yarn})
    assert read_model_config(tmp_path).max_model_len == 96 > NUM_TOKENS
    compare(tmp_path)


@pytest.mark.parametrize("family", ["llama_gqa", "gpt2", "opt_350m_style"])
@pytest.mark.parametrize("saved", ["both, differing", "both, equal", "the embedding", "the output matrix"])
def test_matrices_that_config_json_ties_are_tied_if_they_are_equal(family: str, saved: str, tmp_path: Path) -> None:
    raw = {**config_of(family), "architectures": [type(TINY_MODELS[family]()).__name__]}
    write(tmp_path, {**raw, "tie_word_embeddings": False})
    tensors = load_tensors(tmp_path)
    (embedding,) = (name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight")))
    if saved == "both, equal":
        tensors["lm_head.weight"] = tensors[embedding].clone()
    elif saved == "the embedding":
        del tensors["lm_head.weight"]
    elif saved == "the output matrix":
        del tensors[embedding]
    save_tensors(tensors, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": True}))
    compare(tmp_path)


def check(raw: dict[str, Any], keys: tuple[str, ...], folder: Path) -> None:
    """Refused with the name of a key, or computed as by `transformers`."""
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        ours = read_model_config(folder)
    except CheckpointError as error:
        assert any(key in str(error) for key in keys), error
        return
    theirs = write(folder, raw)
    compare_configs(ours, theirs)
    compare(folder)


def write(folder: Path, raw: dict[str, Any]) -> PreTrainedConfig:
    """Write random weights of the shape that `transformers` reads from the config, and the config itself unchanged."""
    (folder / "config.json").write_text(json.dumps(raw))
    config = AutoConfig.from_pretrained(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    randomise(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    saved: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    return saved


def compare_configs(ours: ModelConfig, theirs: PreTrainedConfig) -> None:
    """Compare the settings that short prompts do not show."""
    assert ours.max_model_len == theirs.max_position_embeddings
    eos = theirs.eos_token_id
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    assert list(ours.eos_token_ids) == [each for each in eos if each < ours.vocab_size]
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.num_layers
    assert ours.sliding_windows == tuple(window if each == "sliding_attention" else None for each in types)


def compare(folder: Path) -> None:
    """Logits of every position of a prompt."""
    prompt = random_prompts((NUM_TOKENS,))[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    decoder = load_decoder(folder, torch.float32, CPU)
    runner = PagedRunner(decoder, num_blocks=8, block_size=16)
    sequence = PagedSequence(prompt, len(prompt), block_table=[6, 1, 4, 3, 7])
    found = reference_logits(decoder, forward_batch([sequence], [len(prompt)], 16, all_logits=True), runner.pool)
    assert (found - expected).abs().max() <= 1e-4 * expected.std()


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def save_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
