"""Steps with chunks of prompts as graphs: captured at padded sizes, with the answers of uncaptured ones."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.step import StepResult
from kernels.attention.cascade_groups import SharingCost
from tests.worker.device.random_steps import RandomSteps
from tests.worker.device.recorded_graphs import RecordedGraphs
from tests.worker.device.sample_steps import comparable
from tests.worker.runners import limits_for, poisoned_pool, run_ahead
from tests.worker.tiny_models import write_tiny_model
from worker_svc.gpu.graphs import graph_sizes
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.gpu.torch_operations import OPERATIONS
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder, load_decoder

FREE = SharingCost(per_step=0, per_group=0, per_row=0)  # so that anything shared is worth it
MODELS = ("llama_gqa", "mistral", "opt")


@pytest.fixture(scope="module", params=MODELS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    torch.set_num_threads(1)
    folder: Path = write_tiny_model(request.param, tmp_path_factory.mktemp("model"))
    return load_decoder(folder, torch.float32, torch.device("cpu"))


def random_pool(decoder: Decoder) -> KVPool:
    """Random keys and values wherever nothing was written, always the same."""
    pool = poisoned_pool(decoder)
    generator = torch.Generator().manual_seed(1)
    for blocks in (pool.blocks, pool.host_blocks):
        blocks.copy_(torch.randn(blocks.shape, generator=generator))
    return pool


def plain_runner(decoder: Decoder) -> DeviceRunner:
    limits = limits_for(decoder)
    return DeviceRunner(decoder, random_pool(decoder), limits, OPERATIONS, graph_sizes(limits.num_seats), cost=FREE)


def captured_runner(decoder: Decoder, max_mixed_tokens: int | None = None) -> DeviceRunner:
    graphs, limits = RecordedGraphs(), limits_for(decoder)
    operations, sizes = graphs.operations(OPERATIONS), graph_sizes(limits.num_seats)
    runner = DeviceRunner(decoder, random_pool(decoder), limits, operations, sizes, graphs=graphs, cost=FREE)
    runner.capture_graphs(max_mixed_tokens)
    return runner


def check_equal(ours: Sequence[StepResult], theirs: Sequence[StepResult]) -> None:
    assert [comparable(each) for each in ours] == [comparable(each) for each in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert [list(each.token_ids) for each in our.candidates] == [list(each.token_ids) for each in their.candidates]
        for index, row in their.logprobs.items():
            assert list(our.logprobs[index].logprobs) == pytest.approx(list(row.logprobs), abs=1e-4)
        for our_prompt, their_prompt in zip(our.prompt_logprobs, their.prompt_logprobs, strict=True):
            expected = pytest.approx(list(their_prompt.rows.logprobs), abs=1e-4)
            assert list(our_prompt.rows.logprobs) == expected


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_random_steps_give_the_same_by_graphs(decoder: Decoder, depth: int) -> None:
    """Compare mixes of rows, with copies, swaps, beams and log-probabilities; no pass is launched kernel by kernel."""
    random_steps = RandomSteps(Random(depth), limits_for(decoder))
    steps = [random_steps.step(number) for number in range(30)]
    captured = captured_runner(decoder)
    check_equal(run_ahead(captured, steps, depth), run_ahead(plain_runner(decoder), steps))
    assert captured.graph_passes["mixed"] and captured.graph_passes["decode"]
    assert sum(captured.graph_passes.values()) == len(steps)
    assert not any(captured.kernel_passes.values())


@pytest.mark.long
@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30), most=st.sampled_from([0, 64, 128, 256]), depth=st.integers(1, 3))
def test_any_mix_of_rows_has_the_tokens_of_an_uncaptured_pass(
    decoder: Decoder, seed: int, most: int, depth: int
) -> None:
    """Larger batches than the largest graph are launched kernel by kernel, and counted with that reason."""
    random_steps = RandomSteps(Random(seed), limits_for(decoder))
    steps = [random_steps.step(number) for number in range(6)]
    captured = captured_runner(decoder, most)
    check_equal(run_ahead(captured, steps, depth), run_ahead(plain_runner(decoder), steps))
    mixed = [sum(step.num_tokens) for step in steps if max(step.num_tokens) > 1]
    too_large = sum(num_tokens > most for num_tokens in mixed)
    assert captured.graph_passes["mixed"] == len(mixed) - too_large
    assert captured.kernel_passes == {
        "no_graphs": 0 if most else too_large,
        "too_many_tokens": too_large if most else 0,
        "many_short_chunks": 0,
    }


def test_without_graphs_every_pass_is_counted_as_such(decoder: Decoder) -> None:
    runner = plain_runner(decoder)
    random_steps = RandomSteps(Random(0), limits_for(decoder))
    run_ahead(runner, [random_steps.step(number) for number in range(5)])
    assert runner.kernel_passes["no_graphs"] == 5
    assert not any(runner.graph_passes.values())


def test_a_released_graph_is_used_no_more(decoder: Decoder) -> None:
    runner = captured_runner(decoder)
    runner.release_graphs()
    random_steps = RandomSteps(Random(3), limits_for(decoder))
    steps = [random_steps.step(number) for number in range(8)]
    check_equal(run_ahead(runner, steps), run_ahead(plain_runner(decoder), steps))
    assert runner.kernel_passes["no_graphs"] == 8


def test_a_value_that_the_host_reads_cannot_be_captured() -> None:
    """Show that a captured pass depends on nothing that the device computes."""

    def read() -> None:
        torch.arange(4).sum().item()

    with pytest.raises(AssertionError, match="reads a value on the host"):
        RecordedGraphs().capture(read)
