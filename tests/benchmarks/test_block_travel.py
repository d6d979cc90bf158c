"""The benchmark of travelling blocks runs in small, and judges what it found."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.random_models import SHAPES, write_random_model
from benchmarks.scale import block_travel
from benchmarks.scale.travel_section import APART, MIXED, ROLES, section_of
from benchmarks.scale.travel_sites import Prompts, TokenTimes

SHAPE = SHAPES["tiny"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(SHAPE, tmp_path_factory.mktemp("random") / "model", torch.device("cpu"))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_running_requests_are_measured_in_all_placements(model: Path) -> None:
    found = block_travel.roles(model, "float32", SHAPE, rounds=1, seconds=0.5)
    assert list(found) == [ROLES, MIXED, APART]
    for (measured,) in found.values():
        assert 0 < measured.idle_p50_ms <= measured.idle_p99_ms and measured.prompts_p99_ms > 0
        assert measured.prompts_per_s > 0 and measured.first_token_p50_ms > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_moves_are_measured_both_ways(model: Path) -> None:
    (row,), blocks_per_s = block_travel.moves(model, "float32", SHAPE, rounds=1, contexts=[200])
    assert row.context == 200 and blocks_per_s is not None
    assert len(row.fetched_ms) == len(row.computed_ms) == 1 and min(*row.fetched_ms, *row.computed_ms) > 0


def test_times_are_between_tokens_within_a_span() -> None:
    assert TokenTimes([1.0, 2.0, 4.0, 5.0, 9.0]).gaps(2.0, 9.0) == [2.0, 1.0]


def test_prompts_share_nothing() -> None:
    prompts = Prompts(SHAPE.vocab_size, 1)
    first, second = prompts.next(64), prompts.next(64)
    assert len(first) == len(second) == 64 and first[:16] != second[:16]


def document(p99_ms: float, fetched_ms: float) -> dict[str, Any]:
    idle = {"idle_p50_ms": 10.0, "idle_p99_ms": 20.0, "prompts_p50_ms": 11.0, "prompts_per_s": 0.5}
    asked = {"first_token_p50_ms": 900.0, "second_token_p50_ms": 30.0}
    return {
        "shape": "125m",
        "dtype": "bfloat16",
        "rounds": 1,
        "cores": 2,
        "running": 6,
        "prompt_lengths": [1000, 1500],
        "prompt_output": 4,
        "bytes_per_block": 200_000,
        "fetch_blocks_per_s": 3000.0,
        "roles": {
            name: [{**idle, **asked, "prompts_p99_ms": p99}]
            for name, p99 in ((ROLES, p99_ms), (MIXED, 90), (APART, 21))
        },
        "moves": [
            {"context": 250, "fetched_ms": [30.0], "computed_ms": [20.0]},
            {"context": 1000, "fetched_ms": [fetched_ms], "computed_ms": [400.0]},
        ],
    }


@pytest.mark.parametrize(
    ("p99_ms", "fetched_ms", "verdict"), [(23.0, 50.0, "met"), (30.0, 50.0, "1 of 2"), (30.0, 500.0, "2 of 2")]
)
def test_roles_and_moves_are_judged(p99_ms: float, fetched_ms: float, verdict: str) -> None:
    section = section_of(document(p99_ms, fetched_ms))
    assert verdict in section.verdict
    assert f"{p99_ms / 20:.2f} × idle" in section.headlines[0].figure
    assert "600 MB/s" in section.headlines[2].figure
