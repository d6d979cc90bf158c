"""Compilation ahead of a start: what it records, and that a start goes on without it."""

from pathlib import Path

import pytest
import structlog
import torch
import triton

from tests.worker.device.launched_steps import CASES, HOPPER, LIMITS
from worker_svc.gpu.launch_compilation import compile_ahead
from worker_svc.gpu.start import GraphRunner
from worker_svc.memory.kv_pool import BlockShape, KVPool
from worker_svc.steps.step_limits import StepLimits

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")


def refuse(pool: KVPool, limits: StepLimits) -> GraphRunner:
    raise RuntimeError("no runner")


def test_a_start_goes_on_if_nothing_can_be_compiled_ahead() -> None:
    shape = BlockShape(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype=torch.float32)
    pool = KVPool(shape, LIMITS.num_blocks, torch.device("cpu"))
    parts: list[float] = []
    with structlog.testing.capture_logs() as entries:
        compile_ahead(refuse, pool, LIMITS, HOPPER, parts.append)
    assert [each["log_level"] for each in entries] == ["warning"] and parts == []


def test_the_launches_of_a_start_are_the_same_each_time(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    case = CASES["fp16"]
    decoder = case.decoder(tmp_path)
    first, second = (case.launches_of_start(decoder) for _ in range(2))
    assert first.keys() == second.keys() and len(first) > 20
