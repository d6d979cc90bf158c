"""Choice of who attends on a device: measured with a fake clock on doubles of the libraries, and kept in a file."""

import json
import math
import os
import pwd
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor

from tests.worker.device.flash_attention_double import FlashAttentionDouble
from tests.worker.device.flashinfer_double import FlashInferDouble
from tests.worker.tiny_models import write_tiny_model
from worker_svc.gpu.libraries.flash_attention import FlashAttention
from worker_svc.gpu.libraries.flashinfer import FlashInfer
from worker_svc.gpu.libraries.library import AttentionLibrary, PassLibraries
from worker_svc.gpu.torch_operations import OPERATIONS
from worker_svc.memory.kv_pool import BlockShape
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.model.families import read_model_config
from worker_svc.option_check import DeviceError, installed_attention
from worker_svc.start.attention_cache import FILE_NAME, AttentionCache, AttentionTimes
from worker_svc.start.attention_choice import (
    UsableLibraries,
    fastest_libraries,
    requested_library,
    trial_size,
    usable_libraries,
)
from worker_svc.start.attention_libraries import LibraryError, load_library
from worker_svc.start.attention_trial import AttentionTrial, Launch, TrialSize
from worker_svc.steps.step_limits import StepLimits
from worker_svc.steps.step_runner import DeviceLostError

SIZE = TrialSize(num_rows=3, context=30, chunk=12)
HOPPER, AMPERE = (9, 0), (8, 0)
KEY = "device; versions; shapes"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """In 16 bits, as on the devices that have libraries."""
    torch.set_num_threads(1)
    folder = write_tiny_model("llama_gqa", tmp_path_factory.mktemp("model"))
    return load_decoder(folder, torch.float16, torch.device("cpu"))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of modules that can be imported, and are forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("flash_attn"):
            del sys.modules[name]


class FakeClock:
    """Launches each pass once, and says the times that it was given, in order."""

    def __init__(self, *times_us: float) -> None:
        self._times_us = list(times_us)

    def launch_us(self, launch: Launch) -> float:
        """See LaunchClock.launch_us."""
        launch()
        return self._times_us.pop(0)

    @property
    def num_left(self) -> int:
        return len(self._times_us)


class LostDeviceClock(FakeClock):
    """A clock whose device is gone after the first pass, which is the runner's own."""

    def launch_us(self, launch: Launch) -> float:
        """See LaunchClock.launch_us."""
        if not self.num_left:
            raise DeviceLostError("CUDA error: an illegal memory access was encountered")
        return super().launch_us(launch)


class WrongFlashAttention(FlashAttentionDouble):
    """A double whose results are not those of attention."""

    def flash_attn_with_kvcache(self, *arguments: Any, **named: Any) -> Tensor:
        """Twice what it should be."""
        return 2 * super().flash_attn_with_kvcache(*arguments, **named)


class BrokenFlashAttention(FlashAttentionDouble):
    """A double that cannot run here."""

    def flash_attn_with_kvcache(self, *arguments: Any, **named: Any) -> Tensor:
        """Fail as a library does that was built for another device."""
        raise RuntimeError("no kernel image is available")


def flash_attention() -> AttentionLibrary:
    return FlashAttention(FlashAttentionDouble(), "3.0.0")


def flashinfer() -> AttentionLibrary:
    return FlashInfer(FlashInferDouble(), "0.6.18")


def both() -> UsableLibraries:
    libraries = [flashinfer(), flash_attention()]
    return UsableLibraries(libraries, list(libraries))


def trial_of(decoder: Decoder) -> AttentionTrial:
    return AttentionTrial(decoder, decoder.block_shape(4), OPERATIONS, SIZE)


def no_trial() -> AttentionTrial:
    raise AssertionError("nothing is to be measured")


def names_of(chosen: PassLibraries) -> tuple[str, ...]:
    return tuple("triton" if library is None else library.name for library in chosen)


@pytest.mark.parametrize(
    ("decode_us", "mixed_us", "expected"),
    [
        ((9.0, 5.0, 7.0), (9.0, 9.5, 4.0), ("flashinfer", "flash-attn")),
        ((9.0, 9.0, 9.5), (9.0, 10.0, 11.0), ("triton", "triton")),
        ((9.0, 9.5, 8.9), (3.0, 3.1, 3.2), ("flash-attn", "triton")),
    ],
)
def test_each_kind_of_pass_gets_whoever_was_fastest_and_later_starts_measure_nothing(
    decoder: Decoder,
    decode_us: tuple[float, ...],
    mixed_us: tuple[float, ...],
    expected: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """Times are in the order of Triton, FlashInfer, FlashAttention-3. Of equal times Triton's counts."""
    cache, clock = AttentionCache(tmp_path / "new"), FakeClock(*decode_us, *mixed_us)
    with capture_logs() as logs:
        chosen = fastest_libraries(both(), lambda: trial_of(decoder), clock, cache, KEY)
    assert names_of(chosen) == expected and clock.num_left == 0
    (line,) = logs
    assert (line["event"], line["decode"], line["prompts"]) == ("attention chosen", *expected)
    assert line["by"] == "measured now"
    assert line["decode_us"] == dict(zip(("triton", "flashinfer", "flash-attn"), decode_us, strict=True))
    with capture_logs() as logs:
        again = fastest_libraries(both(), no_trial, FakeClock(), cache, KEY)
    assert names_of(again) == expected and logs[0]["by"] == "measured before"
    other = FakeClock(*reversed(decode_us), *mixed_us)
    fastest_libraries(both(), lambda: trial_of(decoder), other, cache, "another device")
    assert other.num_left == 0
    assert names_of(fastest_libraries(both(), no_trial, FakeClock(), cache, KEY)) == expected


GOOD = {"triton": 2.0, "flashinfer": 1.0, "flash-attn": 3.0}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "\0\1",
        "[]",
        "null",
        json.dumps({KEY: []}),
        json.dumps({KEY: {"decode_us": GOOD}}),
        json.dumps({KEY: {"decode_us": GOOD, "mixed_us": 3}}),
        json.dumps({KEY: {"decode_us": GOOD, "mixed_us": GOOD, "more": GOOD}}),
        json.dumps({KEY: {"decode_us": GOOD, "mixed_us": {"triton": 1.0}}}),
        json.dumps({KEY: {"decode_us": GOOD, "mixed_us": GOOD | {"flash-attn": -1.0}}}),
        json.dumps({KEY: {"decode_us": GOOD, "mixed_us": GOOD | {"flash-attn": True}}}),
        json.dumps({KEY: {"decode_us": GOOD, "mixed_us": GOOD | {"flash-attn": "1"}}}),
        json.dumps({KEY: {"decode_us": GOOD, "mixed_us": GOOD | {"flash-attn": math.nan}}}),
        json.dumps({KEY: {"decode_us": GOOD, "mixed_us": GOOD | {"other": 1.0}}}),
    ],
)
def test_a_corrupt_file_is_measured_anew_and_mended(decoder: Decoder, content: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    cache, clock = AttentionCache(tmp_path), FakeClock(5, 4, 6, 5, 6, 4)
    chosen = fastest_libraries(both(), lambda: trial_of(decoder), clock, cache, KEY)
    assert names_of(chosen) == ("flashinfer", "flash-attn") and clock.num_left == 0
    assert names_of(fastest_libraries(both(), no_trial, FakeClock(), cache, KEY)) == names_of(chosen)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_folder_that_cannot_be_written_costs_the_measurement_alone(decoder: Decoder, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = AttentionCache(tmp_path / "file" / "folder")
    for _ in range(2):
        clock = FakeClock(5, 4, 6, 5, 6, 4)
        with capture_logs() as logs:
            chosen = fastest_libraries(both(), lambda: trial_of(decoder), clock, cache, KEY)
        assert names_of(chosen) == ("flashinfer", "flash-attn") and clock.num_left == 0
        assert logs[0]["log_level"] == "warning" and "is not kept" in logs[0]["event"]


def test_a_user_without_a_folder_measures_at_each_start(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"quire-{os.getuid()}").touch()  # in the way of the last resort
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with capture_logs() as logs:
        cache = AttentionCache.of_user({})
    assert "QUIRE_CACHE_DIR" in logs[0]["reason"]
    for _ in range(2):
        clock = FakeClock(5, 4, 6, 5, 6, 4)
        assert names_of(fastest_libraries(both(), lambda: trial_of(decoder), clock, cache, KEY))[0] == "flashinfer"
        assert clock.num_left == 0
    kept = AttentionCache.of_user({"QUIRE_CACHE_DIR": str(tmp_path / "kept")})
    kept.keep(KEY, AttentionTimes(decode_us={}, mixed_us={}))
    assert (tmp_path / "kept" / FILE_NAME).is_file()


@pytest.mark.parametrize(
    ("double", "said"),
    [
        (WrongFlashAttention, "flash-attn gave other results than Triton's kernels"),
        (BrokenFlashAttention, "flash-attn failed: RuntimeError: no kernel image is available"),
    ],
)
def test_a_library_that_fails_or_is_wrong_is_left_out_and_tried_again_at_the_next_start(
    decoder: Decoder, double: Callable[[], Any], said: str, tmp_path: Path
) -> None:
    bad = FlashAttention(double(), "3")
    usable = UsableLibraries([bad, flashinfer()], [bad, flashinfer()])
    times = (5, 1, 4, 5, 1, 6) if double is WrongFlashAttention else (5, 4, 5, 6)
    with capture_logs() as logs:
        chosen = fastest_libraries(usable, lambda: trial_of(decoder), FakeClock(*times), AttentionCache(tmp_path), KEY)
    assert names_of(chosen) == ("flashinfer", "triton")
    assert [line["reason"] for line in logs[:2]] == [said, said]
    assert not (tmp_path / FILE_NAME).exists()
    with pytest.raises(DeviceError, match=f"--attention flash-attn was asked for, and {said}: correct that, or leave"):
        requested_library(UsableLibraries([bad], [bad]), trial_of(decoder), FakeClock(5, 1))


def test_a_requested_library_computes_all_passes_that_it_can(decoder: Decoder) -> None:
    library = flashinfer()
    chosen = requested_library(UsableLibraries([library], [library]), trial_of(decoder), FakeClock(1, 9, 1, 9))
    assert names_of(chosen) == ("flashinfer", "flashinfer")
    chosen = requested_library(UsableLibraries([library], []), trial_of(decoder), FakeClock(1, 9))
    assert names_of(chosen) == ("flashinfer", "triton")


def test_a_library_that_breaks_the_device_is_refused_with_what_to_give(decoder: Decoder, tmp_path: Path) -> None:
    """No step could be computed by this process any more, whoever attended, nor by one that starts as it did."""
    said = "attention by flashinfer broke the device .*illegal memory access.*: give --attention triton"
    with pytest.raises(DeviceError, match=said):
        fastest_libraries(both(), lambda: trial_of(decoder), LostDeviceClock(9.0), AttentionCache(tmp_path / "c"), KEY)
    with pytest.raises(DeviceError, match=said):
        requested_library(both(), trial_of(decoder), LostDeviceClock(9.0))


@pytest.mark.parametrize(
    ("capability", "head_dim", "decode", "mixed", "reasons"),
    [
        (HOPPER, 64, ["flashinfer", "flash-attn"], ["flashinfer", "flash-attn"], []),
        (AMPERE, 128, ["flashinfer"], [], ["a graph holds chunks of fixed lengths alone", "compute capability 9.0"]),
        (HOPPER, 80, ["flash-attn"], ["flash-attn"], ["heads have 80 elements"]),
    ],
)
def test_the_log_says_why_a_library_is_not_used(
    decoder: Decoder,
    capability: tuple[int, int],
    head_dim: int,
    decode: list[str],
    mixed: list[str],
    reasons: list[str],
) -> None:
    config = replace(decoder.config, head_dim=head_dim)
    libraries = [flashinfer(), flash_attention()]
    with capture_logs() as logs:
        usable = usable_libraries(libraries, config, torch.bfloat16, torch.bfloat16, capability)
    assert [[library.name for library in each] for each in usable] == [decode, mixed]
    assert len(logs) == len(reasons)
    assert all(reason in line["reason"] for reason, line in zip(reasons, logs, strict=True))


def test_a_model_of_windows_alone_has_nothing_for_a_library(tmp_path: Path) -> None:
    config = replace(read_model_config(write_tiny_model("mistral", tmp_path)), head_dim=64)
    with capture_logs() as logs:
        usable = usable_libraries([flashinfer()], config, torch.float16, torch.float16, HOPPER)
    assert not usable.decode and logs[0]["reason"] == "all layers have a sliding window"


@given(
    seats=st.integers(1, 1024),
    model_len=st.integers(2, 200_000),
    batched=st.integers(1, 8192),
    free=st.integers(0, 1 << 40),
    block_size=st.sampled_from([1, 16, 256]),
)
def test_a_trial_fits_the_limits_and_a_part_of_the_free_memory(
    seats: int, model_len: int, batched: int, free: int, block_size: int
) -> None:
    shape = BlockShape(num_layers=4, num_kv_heads=2, head_dim=64, block_size=block_size, dtype=torch.bfloat16)
    limits = StepLimits(
        num_seats=seats,
        num_blocks=0,
        num_host_blocks=0,
        block_size=block_size,
        vocab_size=10,
        max_model_len=model_len,
        max_batched_tokens=batched,
    )
    size = trial_size(limits, shape, free)
    assert 1 <= size.num_rows <= seats and 1 <= size.context <= model_len and 1 <= size.chunk <= size.context
    if size.num_rows > 1:
        assert size.num_rows + size.chunk <= max(batched, size.num_rows + 1)
    blocks = (size.num_rows + 1) * -(-size.context // block_size)
    assert blocks * shape.bytes_per_block <= max(free / 4, 2 * shape.bytes_per_block)


def test_libraries_are_found_without_being_imported(modules: Path) -> None:
    (modules / "flash_attn_interface.py").write_text("raise OSError('undefined symbol')\n")
    assert "flash-attn" in installed_attention()
    with pytest.raises(LibraryError, match="it cannot be imported: OSError: undefined symbol"):
        load_library("flash-attn")


def test_the_module_of_a_library_is_loaded_by_either_of_its_names(modules: Path) -> None:
    package = modules / "flash_attn_3"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "flash_attn_interface.py").write_text("def flash_attn_with_kvcache(): ...\n")
    assert "flash-attn" in installed_attention()
    library = load_library("flash-attn")
    assert (library.name, library.version) == ("flash-attn", "unknown")
