"""Fingerprints tell apart models of which any tensor differs, at a cost that hardly grows with the model."""

import json
from math import prod
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.worker.tiny_models import write_tiny_model
from worker_svc.checkpoint import weight_samples
from worker_svc.checkpoint.model_folder import fingerprint
from worker_svc.checkpoint.weight_files import WHOLE_FILE, read_headers

_WIDTH, _KV_WIDTH, _INNER, _LAYERS, _VOCAB = 896, 128, 4864, 24, 151_936
_OF_LAYER = {
    "input_layernorm.weight": [_WIDTH],
    "mlp.down_proj.weight": [_WIDTH, _INNER],
    "mlp.gate_proj.weight": [_INNER, _WIDTH],
    "mlp.up_proj.weight": [_INNER, _WIDTH],
    "post_attention_layernorm.weight": [_WIDTH],
    "self_attn.k_proj.bias": [_KV_WIDTH],
    "self_attn.k_proj.weight": [_KV_WIDTH, _WIDTH],
    "self_attn.o_proj.weight": [_WIDTH, _WIDTH],
    "self_attn.q_proj.bias": [_WIDTH],
    "self_attn.q_proj.weight": [_WIDTH, _WIDTH],
    "self_attn.v_proj.bias": [_KV_WIDTH],
    "self_attn.v_proj.weight": [_KV_WIDTH, _WIDTH],
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model("qwen2", tmp_path / "tiny")


@pytest.fixture
def half_billion(tmp_path: Path) -> Path:
    """Holds the files of a model with the tensors of Qwen2.5-0.5B, all of them 0, which takes no space."""
    shapes = {"model.embed_tokens.weight": [_VOCAB, _WIDTH], "model.norm.weight": [_WIDTH]}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(_LAYERS) for name, shape in _OF_LAYER.items()}
    header, end = {}, 0
    for name in sorted(shapes):
        begin, end = end, end + 2 * prod(shapes[name])
        header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (tmp_path / WHOLE_FILE).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(stream.tell() + end)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def change(folder: Path, name: str, begin: int = 0, end: int | None = None) -> None:
    """Overwrite a tensor, or these of its bytes."""
    header = read_headers(folder)[name]
    end = header.end - header.begin if end is None else end
    with (folder / WHOLE_FILE).open("r+b") as stream:
        stream.seek(header.begin + begin)
        stream.write(b"\1" * (end - begin))


def changes_the_fingerprint(folder: Path, *names: str, begin: int = 0, end: int | None = None) -> bool:
    before = fingerprint(folder)
    for name in names:
        change(folder, name, begin, end)
    return fingerprint(folder) != before


def test_every_tensor_changes_the_fingerprint(tiny: Path) -> None:
    original = load_file(tiny / WHOLE_FILE)
    seen = {fingerprint(tiny)}
    for name in original:
        save_file({**original, name: original[name] * 1.5 + 0.5}, tiny / WHOLE_FILE)
        seen.add(fingerprint(tiny))
    assert len(seen) == len(original) + 1


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_an_adapter_that_was_merged_changes_the_fingerprint(projection: str, half_billion: Path) -> None:
    names = [f"model.layers.{i}.self_attn.{projection}.weight" for i in range(_LAYERS)]
    assert changes_the_fingerprint(half_billion, *names)


def test_a_tensor_of_one_layer_does(half_billion: Path) -> None:
    for name in _OF_LAYER:
        assert changes_the_fingerprint(half_billion, f"model.layers.13.{name}"), name


def test_some_hundred_rows_of_the_embedding_do(half_billion: Path) -> None:
    begin = 100_000 * _WIDTH * 2
    assert changes_the_fingerprint(half_billion, "model.embed_tokens.weight", begin=begin, end=begin + (1 << 20))


def test_the_cost_hardly_grows_with_the_model(half_billion: Path) -> None:
    (parts,) = weight_samples.weight_samples([half_billion / WHOLE_FILE])
    assert len(parts) <= 2048 + 2
    assert sum(map(len, parts)) <= (8 << 20) + (1 << 16)


@pytest.mark.parametrize("most_samples", [1, 40])
def test_of_more_tensors_than_samples_the_beginning_of_each_is_seen(
    most_samples: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_samples, "_MOST_SAMPLES", most_samples)
    for name in read_headers(tiny):
        assert changes_the_fingerprint(tiny, name), name


def test_of_far_too_many_tensors_some_are_seen(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_samples, "_MOST_TENSORS", 5)
    names = [*read_headers(tiny)]
    num_seen = sum(changes_the_fingerprint(tiny, name) for name in names)
    assert 0 < num_seen <= 5 < len(names)
