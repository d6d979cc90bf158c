"""The check of a model folder before torch is loaded: in this process, and as `python -m worker_svc --check`."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire import machine
from quire.worker_settings import WorkerSettings
from tests.services import ROOT
from tests.worker.tiny_models import TINY_MODELS, write_tiny_model
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.checkpoint.model_folder import find_checkpoint
from worker_svc.checkpoint.weight_files import read_headers
from worker_svc.memory.kv_pool import BlockShape
from worker_svc.model.families import read_model_config
from worker_svc.model.tensor_names import needed_tensors
from worker_svc.option_check import CheckedOptions, OptionError
from worker_svc.start.pool_check import bytes_per_block, kept_dtype
from worker_svc.start.preflight import check_folder, check_model

USUAL = CheckedOptions.of(WorkerSettings(model="m"))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("llama_gqa", tmp_path_factory.mktemp("tiny"))


def check(model: Path | str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worker_svc", "--check", "--model", str(model), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        act()
    return str(caught.value)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_tensor_that_a_checkpoint_has_is_one_that_the_check_looks_for(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(name, tmp_path)
    headers = read_headers(folder)
    assert {each.name for each in needed_tensors(read_model_config(folder), headers, folder)} == set(headers)
    check_folder(folder)


def test_a_model_on_the_hub_that_was_never_downloaded_passes_for_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants  # noqa: PLC0415 - read when it is imported

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    check_model("nobody/nothing")


@pytest.mark.parametrize("lacks", ["weights", "a shard", "config.json"])
def test_a_model_of_which_the_hubs_cache_lacks_files_passes_for_now(
    lacks: str, pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: where only a tokenizer had been used before, the start refused to download the weights."""
    import huggingface_hub.constants  # noqa: PLC0415 - read when it is imported

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--nobody--something"
    snapshot = Path(shutil.copytree(pristine, repository / "snapshots" / "abc"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert find_checkpoint("nobody/something") == snapshot
    if lacks == "a shard":
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
        (snapshot / "model.safetensors").rename(snapshot / "model-1.safetensors")
    else:
        (snapshot / ("config.json" if lacks == "config.json" else "model.safetensors")).unlink()
    check_model("nobody/something")
    with pytest.raises(CheckpointError):
        check_model(str(snapshot))


def test_a_sequence_longer_than_the_models_positions_is_refused(pristine: Path) -> None:
    with pytest.raises(OptionError, match=r"--max-model-len 257 is more .* give at most --max-model-len 256"):
        check_model(str(pristine), replace(USUAL, max_model_len=257))
    check_model(str(pristine), replace(USUAL, max_model_len=256))


@pytest.mark.parametrize(
    ("changes", "num_bytes", "remedy"),
    [
        ({"dtype": "float32"}, 4, "give --dtype bfloat16 or --weight-dtype int8, or a smaller model"),
        ({"dtype": "bfloat16"}, 2, "give --weight-dtype int8, or a smaller model"),
        ({"dtype": "bfloat16", "weight_dtype": "int8"}, 1, "give a smaller model"),
    ],
)
def test_weights_of_more_than_all_memory_are_refused_before_the_system_kills_who_loads_them(
    changes: dict[str, str], num_bytes: int, remedy: str, pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(USUAL, device="cpu", **changes)  # type: ignore[arg-type]
    shapes = [header.shape for header in read_headers(pristine).values()]
    of_vector = max(num_bytes, 2)
    needed = sum(math.prod(shape) * (num_bytes if len(shape) > 1 else of_vector) for shape in shapes)
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: needed)
    check_model(str(pristine), options)
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: needed - 1)
    with pytest.raises(OptionError, match=rf"the weights need .* of main memory in .*: {remedy}$"):
        check_model(str(pristine), options)


@pytest.mark.parametrize("weight_dtype", ["int4", "fp8"])
def test_weights_of_few_bits_count_as_such_with_the_runner_of_accelerators_too(
    weight_dtype: str, pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: they were refused by the size that they have in the model's dtype."""
    options = replace(USUAL, device="cpu", runner="device", dtype="bfloat16", weight_dtype=weight_dtype)
    num_numbers = sum(math.prod(header.shape) for header in read_headers(pristine).values())
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: 2 * num_numbers - 1)
    check_model(str(pristine), options)
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: num_numbers // 2 - 1)
    with pytest.raises(OptionError, match=f"the weights need .* of main memory in {weight_dtype}, .* give a smaller"):
        check_model(str(pristine), options)


@pytest.mark.parametrize(
    ("changes", "part", "remedy"),
    [
        ({"runner": "device"}, 0.5, "give --dtype bfloat16 or --weight-dtype int4, or a smaller model"),
        ({"kernels": "torch"}, 0.9, "give --dtype bfloat16, or a smaller model"),
        ({"dtype": "float16"}, 0.4, "give a smaller model"),
        ({}, 0.4, "give --weight-dtype int8, or a smaller model"),
        ({}, 0.1, "give a smaller model"),
    ],
)
def test_too_large_weights_are_refused_with_options_that_this_worker_takes_and_that_suffice(
    changes: dict[str, str], part: float, remedy: str, pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: int8 was named to a worker that refuses it. `part`: of the weights in float32, that there is."""
    options = replace(USUAL, device="cpu", **{"dtype": "float32", **changes})  # type: ignore[arg-type]
    num_numbers = sum(math.prod(header.shape) for header in read_headers(pristine).values())
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: int(part * 4 * num_numbers) + 1)
    with pytest.raises(OptionError, match=rf"of main memory in .*: {remedy}$"):
        check_model(str(pristine), options)


def test_a_rank_on_another_machine_leaves_the_size_of_the_weights_to_rank_0(
    pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was refused by its own options, though rank 0's dtypes hold for the group."""
    options = replace(USUAL, device="cpu", tensor_parallel=2, group_address="10.0.0.7:7900", rank=1)
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: 1)
    check_model(str(pristine), options)
    with pytest.raises(OptionError, match="the weights need"):
        check_model(str(pristine), replace(options, rank=0))


@pytest.mark.parametrize("kept", ["float32", "bfloat16", "float16", "fp8", "int8"])
def test_the_bytes_of_a_block_are_those_that_the_pool_takes(pristine: Path, kept: str) -> None:
    config = read_model_config(pristine)
    dtype = torch.float8_e4m3fn if kept == "fp8" else getattr(torch, kept)
    shape = BlockShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=5,
        dtype=dtype,
    )
    assert bytes_per_block(config, 5, kept) == shape.bytes_per_block


@pytest.mark.parametrize(
    ("changes", "has_driver", "kept"),
    [
        ({}, False, ("float32", "bfloat16")),
        ({"dtype": "float32"}, True, ("float32",)),
        ({"device": "cuda"}, True, ("float16",)),
        ({"kv_dtype": "int8"}, True, ("int8",)),
        ({}, True, (None,)),  # float16 on a GPU, nowhere else
    ],
)
def test_the_dtype_of_blocks_is_told_where_it_does_not_depend_on_what_torch_finds(
    changes: dict[str, str], has_driver: bool, kept: tuple[str | None, ...]
) -> None:
    options = replace(USUAL, **changes)  # type: ignore[arg-type]
    assert kept_dtype(options, "float16", has_driver=has_driver) in kept


def test_a_check_without_a_fault_says_nothing_and_ends_with_exit_code_0(pristine: Path) -> None:
    completed = check(pristine)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")


def test_a_wrong_architecture_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    completed = check(tmp_path)
    assert completed.returncode == 2
    (line,) = completed.stderr.splitlines()
    assert line.startswith(f"worker: {tmp_path}/config.json: architectures names a ")


def test_an_unknown_dtype_is_one_line_and_exit_code_2(pristine: Path) -> None:
    completed = check(pristine, "--dtype", "fp16")
    assert completed.returncode == 2
    (line,) = completed.stderr.splitlines()
    assert line.startswith("worker: --dtype: ")
