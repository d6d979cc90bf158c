"""Whole steps with the kernels: the accelerator's runner, against the same runner with the torch references.

Steps are replayed from graphs: a GPU's, and recorded ones elsewhere.
"""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.sampling_params import SequenceSampling
from common.step import Step, StepResult
from kernels.attention.cascade_groups import SharingCost
from kernels.attention.prefill_reference import PrefillPlan
from kernels.attention.shape import Attended, ScoreRule
from tests.kernels.on_device.devices import DEVICE, HAS_GPU
from tests.kernels.on_device.rounding import assert_apart_by_rounding, scored_run
from tests.worker.device.recorded_graphs import RecordedGraphs
from tests.worker.device.sample_steps import DRAWN, PROMPT, comparable, decode_steps
from tests.worker.runners import NUM_SEATS, limits_for, poisoned_pool, run_ahead
from tests.worker.steps import GREEDY, seat_state
from tests.worker.tiny_models import TINY_MODELS, random_prompts, write_tiny_model
from worker_svc.gpu import torch_operations, triton_operations
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.operations import Operations
from worker_svc.steps.step_limits import StepLimits

FREE = SharingCost(per_step=0, per_group=0, per_row=0)
# The interpreter is slow.
MODELS = list(TINY_MODELS) if HAS_GPU else ["llama_gqa"]
COSTS = {"apart": None, "sharing prefixes": FREE} if HAS_GPU else {"sharing prefixes": FREE}


def decoder_on(device: torch.device, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(folder, dtype, device)


def random_pool(decoder: Decoder, limits: StepLimits) -> KVPool:
    """Random keys and values, always the same, as of sequences whose tokens were computed before."""
    pool = KVPool(decoder.block_shape(limits.block_size), limits.num_blocks, decoder.device, limits.num_host_blocks)
    values = torch.randn(pool.blocks.shape, generator=torch.Generator().manual_seed(1))
    pool.blocks.copy_(values.to(pool.blocks.dtype))
    return pool


def run_kernels(
    decoder: Decoder,
    steps: list[Step],
    cost: SharingCost | None,
    depth: int = 2,
    *,
    pool: KVPool | None = None,
    limits: StepLimits | None = None,
    operations: Operations = triton_operations.OPERATIONS,
) -> tuple[list[StepResult], KVPool]:
    """Launch `depth` steps before the first of them is answered."""
    pool, limits, sizes = pool or poisoned_pool(decoder), limits or limits_for(decoder), graph_sizes(NUM_SEATS)
    recorded = None if HAS_GPU else RecordedGraphs()
    if recorded is not None:  # in the interpreter, which is slow
        operations, sizes = recorded.operations(operations), (NUM_SEATS,)
    runner = DeviceRunner(decoder, pool, limits, operations, sizes, cost=cost, graphs=recorded)
    with nullcontext() if recorded is None else recorded.standing_in(torch_operations.OPERATIONS):
        runner.capture_graphs(None if HAS_GPU else 64)
    results = run_ahead(runner, steps, depth)
    assert not any(runner.kernel_passes.values())
    return results, pool


def run_references(
    decoder: Decoder, steps: list[Step], pool: KVPool | None = None, limits: StepLimits | None = None
) -> list[StepResult]:
    runner = DeviceRunner(
        decoder,
        pool or poisoned_pool(decoder),
        limits or limits_for(decoder),
        torch_operations.OPERATIONS,
        graph_sizes(NUM_SEATS),
    )
    return [runner.launch(step).wait() for step in steps]


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "depth"), [(torch.float32, 2), (torch.float16, 3)], ids=str)
def test_kernels_and_references_sample_the_same_tokens(
    dtype: torch.dtype, depth: int, name: str, cost: SharingCost | None, tmp_path: Path
) -> None:
    """In float16 a GPU rounds elsewhere than a CPU; in the interpreter, a CPU too, results are equal."""
    folder = write_tiny_model(name, tmp_path, dtype=dtype)
    steps = decode_steps(12 if HAS_GPU else 2)
    ours, _ = run_kernels(decoder_on(DEVICE, folder, dtype), steps, cost, depth)
    on_cpu = decoder_on(torch.device("cpu"), folder, dtype)
    if HAS_GPU and dtype == torch.float16:
        exact = scored_run(decoder_on(torch.device("cpu"), folder), steps)
        assert_apart_by_rounding(steps, ours, scored_run(on_cpu, steps), exact, DRAWN.repetition_penalty)
        return
    expected = run_references(on_cpu, steps)
    assert [comparable(result) for result in ours] == [comparable(result) for result in expected]
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    for result, reference in zip(ours, expected, strict=True):
        for index, row in reference.logprobs.items():
            assert list(result.logprobs[index].logprobs) == pytest.approx(list(row.logprobs), abs=tolerance)


def chunks_of_a_long_prompt() -> list[Step]:
    """Three chunks at the end of a context of 700 tokens, beside a row that decodes."""
    tokens = random_prompts([720], seed=7)[0]
    long = seat_state(0, tokens[700:], list(range(45)), position=700, num_prompt_tokens=720, history=tokens[:700])
    other = seat_state(1, PROMPT[-1:], [60], position=8, num_prompt_tokens=9, history=PROMPT[:8])
    long.sampling = other.sampling = GREEDY
    steps = [
        Step(epoch=1, step_id=1, snapshot=True, whole=[long, other], rows=[0, 1], samples=[1, 1]),
        Step(epoch=1, step_id=2, rows=[0, 1], samples=[1, 1]),
        Step(epoch=1, step_id=3, rows=[1, 0], samples=[0, 1, 1, 0]),
    ]
    for step, num_tokens in zip(steps, ([9, 1], [4, 1], [1, 7]), strict=True):
        step.num_tokens = num_tokens
    return steps


@pytest.mark.skipif(HAS_GPU, reason="a GPU has more processors, for which nothing here is long enough to be split")
@pytest.mark.parametrize(("dtype", "depth"), [(torch.float32, 1), (torch.float16, 2), (torch.float32, 3)], ids=str)
def test_keys_of_chunks_are_split_in_captured_steps(dtype: torch.dtype, depth: int, tmp_path: Path) -> None:
    splits: list[int] = []

    def prefill(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: PrefillPlan,
        rule: ScoreRule,
        with_lse: bool = False,
        out: Tensor | None = None,
    ) -> Attended:
        splits.append(max((fields[5] for fields in plan.work.tolist() if fields[0] >= 0), default=0))
        return triton_operations.OPERATIONS.prefill_attention(query, keys, values, plan, rule, with_lse, out)

    config = write_tiny_model("llama_gqa", tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 1024}))
    decoder, steps = decoder_on(DEVICE, tmp_path, dtype), chunks_of_a_long_prompt()
    limits = replace(limits_for(decoder), block_size=16, max_model_len=1024)
    operations = replace(triton_operations.OPERATIONS, prefill_attention=prefill)
    pools = [random_pool(decoder, limits) for _ in range(2)]
    ours, _ = run_kernels(decoder, steps, None, depth, pool=pools[0], limits=limits, operations=operations)
    expected = run_references(decoder, steps, pools[1], limits)
    assert splits[-3 * decoder.config.num_layers :] == [2] * (3 * decoder.config.num_layers)
    assert [comparable(result) for result in ours] == [comparable(result) for result in expected]
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(pools[0].blocks, pools[1].blocks, rtol=tolerance, atol=tolerance)


def test_blocks_swapped_out_and_in_again_and_copied_go_on_as_before(tmp_path: Path) -> None:
    """A sequence leaves for the host while another computes, and comes back beside a prompt; rows are ranked."""
    folder = write_tiny_model("llama_gqa", tmp_path)
    first = seat_state(0, PROMPT, [5, 6, 7], sampling=replace(DRAWN, num_prompt_logprobs=1))
    other = seat_state(1, PROMPT[::-1], [6, 7, 5], sampling=SequenceSampling(seed=1, top_k=5, top_p=0.9))
    back = seat_state(2, PROMPT[-1:], [40, 41, 42], position=8, num_prompt_tokens=9, history=PROMPT[:8])
    back.sampling = DRAWN
    third = seat_state(3, PROMPT[:5], [20, 21])
    steps = [
        Step(epoch=1, step_id=1, snapshot=True, whole=[first], rows=[0], num_tokens=[9]),
        Step(epoch=1, step_id=2, freed_seats=[0], swap_out=[5, 2, 6, 0, 7, 3], whole=[other], rows=[1]),
        Step(epoch=1, step_id=3, swap_in=[2, 40, 0, 41, 3, 42], whole=[back, third], rows=[2, 3, 1]),
        Step(epoch=1, step_id=4, copies=[42, 50], rows=[1], samples=[], candidates=[0, 4]),
    ]
    steps[1].num_tokens, steps[2].num_tokens = [9], [1, 5, 1]
    ours, _ = run_kernels(decoder_on(DEVICE, folder), steps, None)
    expected = run_references(decoder_on(torch.device("cpu"), folder), steps)
    assert [comparable(result) for result in ours] == [comparable(result) for result in expected]
    assert [bool(result.swap_ns) for result in ours] == [False, True, True, False]
    (found,), (wanted,) = ours[-1].candidates, expected[-1].candidates
    assert list(found.token_ids) == list(wanted.token_ids)
    assert list(found.logprobs) == pytest.approx(list(wanted.logprobs), abs=1e-3)
    (found_prompt,), (wanted_prompt,) = ours[0].prompt_logprobs, expected[0].prompt_logprobs
    assert list(found_prompt.rows.logprobs) == pytest.approx(list(wanted_prompt.rows.logprobs), abs=1e-3)
