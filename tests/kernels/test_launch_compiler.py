"""Recorded launches are compiled side by side, and the real launches find them in Triton's cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernels.launches.launch_compiler import compile_launches
from kernels.launches.launch_recorder import RecordedLaunch, absent_gpu, recorded_launches

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
TILES = (8, 16, 32)


@triton.jit  # type: ignore[untyped-decorator]
def _scale(x_ptr: tl.tensor, factor: tl.tensor, TILE: tl.constexpr) -> None:
    p_x = x_ptr + tl.arange(0, TILE)
    tl.store(p_x, tl.load(p_x) * factor)


@triton.jit  # type: ignore[untyped-decorator]
def _refused(x_ptr: tl.tensor, TILE: tl.constexpr) -> None:
    tl.store(x_ptr + tl.arange(0, TILE), 0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def hits() -> Iterator[list[bool]]:
    """For each compilation, whether its result was in the cache."""
    found: list[bool] = []

    def note(*, cache_hit: bool, **_: Any) -> None:
        found.append(cache_hit)

    triton.knobs.compilation.listener = note
    yield found
    triton.knobs.compilation.listener = None


def launched(tile: int) -> dict[str, Any]:
    return {"TILE": tile, "num_warps": 1, "enable_fp_fusion": True}


def recorded() -> list[RecordedLaunch]:
    x = torch.zeros(64)
    with recorded_launches() as recorder:
        for tile in TILES:
            _scale[(1,)](x, 0.5, **launched(tile))
    return list(recorder.launches.values())


@pytest.mark.usefixtures("cache")
def test_a_launch_finds_what_was_compiled_ahead(hits: list[bool]) -> None:
    parts: list[float] = []
    assert compile_launches(recorded(), 90, 2, parts.append) == []
    assert hits == [False] * len(TILES)
    assert parts == [1 / 3, 2 / 3, 1.0]
    hits.clear()
    with absent_gpu(90):
        for tile in TILES:
            _scale.warmup(torch.zeros(64), 0.5, grid=(1,), **launched(tile))
    assert hits == [True] * len(TILES)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_more(x_ptr: tl.tensor, factor: tl.tensor, TILE: tl.constexpr) -> None:
    p_x = x_ptr + tl.arange(0, TILE)
    tl.store(p_x, tl.load(p_x) * factor * factor + factor)


@pytest.mark.usefixtures("cache")
def test_the_longest_kernels_come_first() -> None:
    with recorded_launches() as recorder:
        for kernel in (_scale, _scale_more):
            kernel[(1,)](torch.zeros(64), 0.5, **launched(8))
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda *, src, **_: compiled.append(src.name)
    try:
        assert compile_launches(list(recorder.launches.values()), 90, 1) == []
    finally:
        triton.knobs.compilation.listener = None
    assert compiled == ["_scale_more", "_scale"]


@pytest.mark.usefixtures("cache")
def test_what_the_compiler_refuses_is_named_and_the_others_are_compiled(hits: list[bool]) -> None:
    with recorded_launches() as recorder:
        _refused[(1,)](torch.zeros(64), **launched(12))  # no power of two
    faults = compile_launches([*recorder.launches.values(), *recorded()], 90, 2)
    assert len(faults) == 1 and faults[0].startswith("_refused(x_ptr: *fp32 %16, TILE=12)")
    assert hits == [False] * len(TILES)
