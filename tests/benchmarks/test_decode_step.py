"""The benchmark of a decode step: its bytes, its window, its figures; and all its processes in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.decode_step import WARM_UP_STEPS, Plan, Window, check_pool, cost_of, prompts, work_of
from benchmarks.gpu.roofline import Roofline, Work
from benchmarks.random_models import SHAPES, write_random_model
from benchmarks.report import ROOT
from benchmarks.services.step_trace import SchedulerMoments

MS = 1_000_000


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = write_random_model(SHAPES["tiny"], tmp_path_factory.mktemp("model") / "tiny", torch.device("cpu"))
    return Plan(model=folder, device="cpu", dtype="bfloat16", batch=4, context=100, num_steps=20)


def test_the_work_of_a_step_is_all_weights_and_the_kv_of_all_contexts(plan: Plan) -> None:
    products, attention = work_of(plan, 50.0)
    # Each weight has 2 bytes, and for each of 4 rows a product and a sum.
    assert products == Work(2 * SHAPES["tiny"].num_step_weights, 2 * 4 * SHAPES["tiny"].num_step_weights)
    # 2 tensors x 2 layers x 2 KV heads x 16 numbers of 2 bytes a token; 2 products with 4 heads of 16 in 2 layers
    assert attention == Work(4 * 50 * 2 * 2 * 2 * 16 * 2, 4 * 50 * 2 * 2 * 2 * 4 * 16)


def test_the_floor_of_each_part_is_the_longer_one_of_reading_and_computing() -> None:
    roofline = Roofline(bytes_per_s=100.0, flop_per_s=1000.0)
    assert roofline.floor_s([Work(200, 1000), Work(100, 4000)]) == 2.0 + 4.0


def test_prompts_differ_and_reach_the_context_half_way(plan: Plan) -> None:
    assert [len(prompt) for prompt in prompts(plan)] == [100 - (WARM_UP_STEPS + 20) // 2] * 4
    assert len({tuple(prompt) for prompt in prompts(plan)}) == 4
    assert prompts(plan) == prompts(plan)


def test_a_step_is_from_result_to_result_within_the_window(plan: Plan) -> None:
    # Results every 10 ms from 5 ms on; executions of 8 ms. The window holds those at 15 to 995 ms, 99 of them.
    moments = [
        SchedulerMoments(step_id=n, sent_ns=0, taken_ns=(10 * n + 5) * MS, exec_ns=8 * MS, cpu_ns=2 * n * MS)
        for n in range(120)
    ]
    window = Window(began_ns=10 * MS, ended_ns=1000 * MS, began_tokens=4 * 80, ended_tokens=4 * 120)
    num_bytes = sum(part.num_bytes for part in work_of(plan, 100.0))
    roofline = Roofline(num_bytes / 0.005, 1e30)  # reads it all in 5 ms, and computes in no time
    cost = cost_of(plan, window, moments, roofline)
    assert cost.num_steps == 99 - WARM_UP_STEPS - 1
    assert (cost.mean_context, cost.step_ms, cost.exec_ms, cost.not_hidden_ms) == (100.0, 10.0, 8.0, 2.0)
    assert (cost.scheduler_cpu_ms, cost.floor_ms, cost.ratio, cost.tokens_per_s) == (2.0, 5.0, 2.0, 400.0)


def test_a_window_without_steps_is_refused(plan: Plan) -> None:
    with pytest.raises(ValueError, match="no two consecutive decode steps"):
        cost_of(plan, Window(0, 1, 4, 4), [], Roofline(1e9, 1e12))


def test_a_pool_that_does_not_hold_the_batch_is_refused_with_what_to_give(plan: Plan) -> None:
    # 4 requests of 100 tokens in the middle of 10 + 20 steps
    check_pool(plan, {"pool_tokens": 4 * 115})
    with pytest.raises(ValueError, match="holds 459 tokens, and 4 requests side by side need 460: give a smaller"):
        check_pool(plan, {"pool_tokens": 4 * 115 - 1})


@pytest.mark.long
def test_the_benchmark_runs_in_small(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.decode_step", "--device", "cpu", "--small", "--out", str(tmp_path)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert completed.returncode == 0, completed.stderr
    result = json.loads((tmp_path / "decode_step.json").read_text())
    assert result["is_smoke_test"] and result["step_ms"] > 0 and result["exec_ms"] > 0
    assert result["key_figures"]["decode_step_over_floor"] == result["ratio"]
    assert result["worker"]["startup_ms"]["weights"] > 0
