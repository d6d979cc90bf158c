"""Finding checkpoints, and refusing what cannot be loaded with a message that says what to do."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import structlog
import structlog.testing
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.native.packed_product import PackedProduct, ProductMaker
from tests.worker.tiny_models import TINY_MODELS, write_tiny_model
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.model_folder import fingerprint, resolve_checkpoint
from worker_svc.checkpoint.weight_files import read_headers
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.model.layers import Linear, MakeProduct, Product

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama_gqa", tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return shutil.copytree(pristine, tmp_path / "checkpoint")


def _refusal(act: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        act()
    return str(caught.value)


def _weight(product: Product) -> Tensor:
    assert isinstance(product, Linear)
    return product.weight


def _load(folder: Path) -> Decoder:
    return load_decoder(folder, None, CPU)


def _edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def _split(folder: Path) -> None:
    """Spread the weights over two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, at in weight_map.items() if at == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_local_folder_is_its_own_checkpoint(folder: Path) -> None:
    assert resolve_checkpoint(str(folder)) == folder


def test_an_unknown_folder_is_refused(tmp_path: Path) -> None:
    message = _refusal(lambda: resolve_checkpoint(str(tmp_path / "nowhere")))
    assert "there is no folder" in message
    assert "check the path" in message


def test_a_file_is_refused_in_favour_of_its_folder(folder: Path) -> None:
    assert "give the folder" in _refusal(lambda: resolve_checkpoint(str(folder / "config.json")))


def test_an_unreachable_hub_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = _refusal(lambda: resolve_checkpoint("nobody/nothing"))
    assert "'nobody/nothing' is no local folder" in message
    assert "network" in message
    assert "path of a local folder" in message


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_no_fault_of_the_hub(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a full disk and a home that is read only were told as a model that the hub does not give."""

    def download(*_: object, **__: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "/cache/hub")
    message = _refusal(lambda: resolve_checkpoint("nobody/nothing"))
    assert message == (
        f"'nobody/nothing' cannot be kept in /cache/hub: {os.strerror(number)}; make room there, or name another "
        "folder for models of the hub by HF_HOME"
    )


def test_a_name_that_no_hub_has_is_refused() -> None:
    assert "neither a folder nor a valid hub id" in _refusal(lambda: resolve_checkpoint("what is this?"))


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json" in _refusal(lambda: resolve_checkpoint(str(folder)))


def test_pickled_weights_are_refused_with_how_to_convert_them(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = _refusal(lambda: resolve_checkpoint(str(folder)))
    assert "pytorch_model.bin" in message
    assert "convert to safetensors" in message


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no *.safetensors file" in _refusal(lambda: resolve_checkpoint(str(folder)))


def test_a_missing_shard_is_named(folder: Path) -> None:
    _split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "lacks model-00002-of-00002.safetensors" in _refusal(lambda: resolve_checkpoint(str(folder)))


def test_sharded_weights_are_the_same_weights(folder: Path, pristine: Path) -> None:
    _split(folder)
    ours, whole = _load(folder), _load(pristine)
    assert torch.equal(_weight(ours.layers[2].mlp.up), _weight(whole.layers[2].mlp.up))
    assert torch.equal(_weight(ours.head), _weight(whole.head))


def test_a_tensor_that_two_files_without_an_index_have_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.fp32.safetensors")
    assert read_headers(folder)
    shutil.copy(folder / "model.fp32.safetensors", folder / "backup.safetensors")
    message = _refusal(lambda: read_headers(folder))
    assert "lm_head.weight" in message
    assert "backup.safetensors" in message
    assert "model.fp32.safetensors" in message


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_adapter_is_refused_with_how_to_merge_it(is_alone: bool, folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert resolve_checkpoint(str(folder)) == folder  # left behind, when the adapter had been merged
    if is_alone:
        (folder / "config.json").unlink()
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    else:
        shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")
    message = _refusal(lambda: resolve_checkpoint(str(folder)))
    assert "adapter_config.json, adapter_model.safetensors" in message
    assert "merge" in message


def test_damaged_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no header at all")
    assert "damaged" in _refusal(lambda: _load(folder))


def test_a_clone_without_its_large_files_is_refused_with_how_to_get_them(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "model.safetensors is a pointer of Git LFS" in _refusal(lambda: read_headers(folder))
    assert "git lfs pull" in _refusal(lambda: _load(folder))


def test_config_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in _refusal(lambda: _load(folder))


def test_a_missing_tensor_is_named(folder: Path) -> None:
    _edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "no tensor 'model.layers.1.mlp.up_proj.weight'" in _refusal(lambda: _load(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_refused_with_the_tensors_name(
    dtype: torch.dtype, name: str, value: float, folder: Path
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        spoilt = tensors[name].to(dtype)
        spoilt.view(-1)[-3] = value
        tensors[name] = spoilt

    _edit_weights(folder, spoil)
    assert f"tensor '{name}'" in _refusal(lambda: _load(folder))


def test_weights_that_a_smaller_dtype_does_not_hold_are_refused_with_the_ones_that_do(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    _edit_weights(folder, lambda tensors: tensors[name].view(-1)[5:6].fill_(1e6))
    message = _refusal(lambda: load_decoder(folder, torch.float16, CPU))
    assert name in message
    assert "--dtype bfloat16 or float32" in message
    load_decoder(folder, torch.bfloat16, CPU)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_floating_point_numbers_are_refused(dtype: torch.dtype, folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    _edit_weights(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert f"tensor '{name}'" in _refusal(lambda: _load(folder))


def test_weights_that_config_json_has_no_place_for_are_named_in_a_warning(folder: Path) -> None:
    _edit_weights(
        folder,
        lambda tensors: tensors.update(
            {
                "model.layers.0.self_attn.q_proj.bias": torch.ones(64),
                "model.layers.3.mlp.up_proj.weight": torch.ones(2, 2),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),  # saved by older versions
            }
        ),
    )
    with structlog.testing.capture_logs() as logs:
        _load(folder)
    (warning,) = (each["event"] for each in logs if each["log_level"] == "warning")
    assert "2 of the tensors" in warning
    assert "model.layers.0.self_attn.q_proj.bias, model.layers.3.mlp.up_proj.weight" in warning
    assert "inv_freq" not in warning


@pytest.mark.parametrize("name", TINY_MODELS)
def test_no_weight_of_a_sound_checkpoint_is_left_out(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(name, tmp_path)
    with structlog.testing.capture_logs() as logs:
        _load(folder)
    assert not logs


def test_a_missing_embedding_is_named_as_the_family_calls_it(folder: Path) -> None:
    _edit_weights(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert "model.embed_tokens.weight" in _refusal(lambda: _load(folder))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    _edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(32, 64)}))
    message = _refusal(lambda: _load(folder))
    assert name in message
    assert "[32, 64]" in message
    assert "[64, 64]" in message


def test_weights_saved_without_their_prefix_load_too(tmp_path: Path) -> None:
    folder = write_tiny_model("gpt2", tmp_path)
    whole = _load(folder)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "model.safetensors")
    assert torch.equal(_weight(_load(folder).layers[0].attention.qkv), _weight(whole.layers[0].attention.qkv))


@pytest.mark.parametrize("make_product", [Linear, ProductMaker()], ids=["plain", "packed"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_no_weight_stays_in_the_memory_of_its_file(name: str, make_product: MakeProduct, tmp_path: Path) -> None:
    """Regression: a checkpoint written over the served one changed its embedding; a shorter one ended the worker."""
    folder = write_tiny_model(name, tmp_path)
    decoder = load_decoder(folder, None, CPU, make_product)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert decoder.weight_bytes > 0  # it is still there


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_decoder_takes_every_parameter_once(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(name, tmp_path)
    decoder = _load(folder)
    saved = load_file(folder / "model.safetensors")
    assert decoder.num_parameters == sum(tensor.numel() for tensor in saved.values())
    assert decoder.weight_bytes == 4 * decoder.num_parameters


@pytest.mark.parametrize("saves_both", [False, True])
def test_a_tied_head_is_packed_as_any_other_matrix(saves_both: bool, tmp_path: Path) -> None:
    """Keep the embedding beside it, which is looked up by rows."""
    folder = write_tiny_model("llama_mqa", tmp_path)
    if saves_both:
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors")
    plain, packed = _load(folder), load_decoder(folder, torch.float32, CPU, ProductMaker())
    assert isinstance(packed.head, PackedProduct)
    assert packed.num_parameters == plain.num_parameters
    padding = packed.weight_bytes - plain.weight_bytes - packed.token_embedding.nbytes
    assert 0 <= padding < 0.02 * packed.weight_bytes  # a packed matrix is whole panels
    rows = torch.randn(5, plain.config.embed_dim)
    torch.testing.assert_close(packed.head(rows), plain.head(rows))


def test_the_fingerprint_knows_the_checkpoint_and_not_its_place(folder: Path, pristine: Path) -> None:
    assert fingerprint(folder) == fingerprint(pristine)


@pytest.mark.parametrize("change", ["config", "weights", "tokenizer", "template"])
def test_the_fingerprint_tells_changed_checkpoints_apart(change: str, folder: Path, pristine: Path) -> None:
    if change == "config":
        (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    elif change == "weights":  # the same names, shapes and size: a fine-tune
        _edit_weights(folder, lambda tensors: [tensor.mul_(1.5) for tensor in tensors.values()])
    elif change == "tokenizer":
        (folder / "tokenizer.json").write_text("{}")
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    assert fingerprint(folder) != fingerprint(pristine)
