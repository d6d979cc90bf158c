"""Passes of ranks on accelerators, captured as graphs with their collectives: what one process computes.

Ranks are threads, and NCCL is a double that keeps what it is asked for. Real processes: `test_group_steps`.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.step import Step, StepResult
from tests.worker.device.random_steps import RandomSteps
from tests.worker.device.recorded_graphs import RecordedGraphs
from tests.worker.device.test_mixed_graphs import FREE, check_equal, plain_runner, random_pool
from tests.worker.device.thread_ranks import ThreadCollectives, collectives_of, on_all_ranks
from tests.worker.runners import limits_for, run_ahead
from tests.worker.tiny_models import write_tiny_model
from worker_svc.gpu.graphs import graph_sizes, token_sizes
from worker_svc.gpu.runner import DeviceRunner
from worker_svc.gpu.torch_operations import OPERATIONS
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.model.model_part import ModelPart
from worker_svc.ranks.nccl_ranks import NcclRanks

# One head of keys and values for two ranks; windows; biases and learned positions; projections of embeddings, and norms
# after the layers; norms over all heads.
MODELS = ("llama_mqa", "mistral", "opt", "opt_350m_style", "olmo2")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DividedModel:
    """A model, whole and in parts."""

    whole: Decoder
    parts: dict[int, list[Decoder]]  # by number of ranks

    def random_steps(self, seed: int) -> RandomSteps:
        return RandomSteps(Random(seed), limits_for(self.whole))

    def pool_of(self, part: ModelPart) -> KVPool:
        """The blocks of the whole model, with the heads of a part."""
        whole, decoder = random_pool(self.whole), self.parts[part.size][part.rank]
        span, size = part.span_of_kv(self.whole.config), self.whole.config.head_dim
        heads = slice(span.begin // size, span.end // size)
        pool = KVPool(decoder.block_shape(whole.block_size), whole.num_blocks, CPU, whole.num_host_blocks, 16)
        for ours, theirs in ((pool.blocks, whole.blocks), (pool.host_blocks, whole.host_blocks)):
            ours.copy_(theirs[:, :, :, :, heads])
        return pool

    def runner(self, ranks: NcclRanks, graphs: RecordedGraphs) -> DeviceRunner:
        """One rank's runner, which takes as much as it can from graphs."""
        part = ModelPart(ranks.rank, ranks.size)
        decoder, limits = self.parts[part.size][part.rank], limits_for(self.whole)
        operations, sizes = graphs.operations(OPERATIONS), graph_sizes(limits.num_seats)
        pool = self.pool_of(part)
        return DeviceRunner(decoder, pool, limits, operations, sizes, graphs=graphs, cost=FREE, ranks=ranks)

    def run_on_ranks(
        self, size: int, steps: list[Step], depth: int, *, captured: bool = True
    ) -> tuple[list[list[StepResult]], list[ThreadCollectives]]:
        """Results of each rank."""

        def work(ranks: NcclRanks, group: ThreadCollectives, graphs: RecordedGraphs) -> list[StepResult]:
            runner = self.runner(ranks, graphs)
            if captured:
                runner.capture_graphs()
            group.calls.clear()
            results = run_ahead(runner, steps, depth)
            assert (sum(runner.graph_passes.values()) == len(steps)) == captured
            return results

        return on_all_ranks(size, work)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DividedModel:
    torch.set_num_threads(1)
    folder: Path = write_tiny_model(request.param, tmp_path_factory.mktemp("model"))
    parts = {
        size: [load_decoder(folder, torch.float32, CPU, model_part=ModelPart(rank, size)) for rank in range(size)]
        for size in (2, 4)
    }
    return DividedModel(load_decoder(folder, torch.float32, CPU), parts)


@pytest.mark.long
@pytest.mark.parametrize(("size", "depth"), [(2, 1), (2, 2), (2, 3), (4, 2)])
def test_captured_passes_of_ranks_give_what_one_process_gives(model: DividedModel, size: int, depth: int) -> None:
    """Compare mixes of rows, with copies, swaps, beams and log-probabilities; no pass is launched kernel by kernel."""
    random_steps = model.random_steps(depth)
    steps = [random_steps.step(number) for number in range(16)]
    expected = run_ahead(plain_runner(model.whole), steps)
    by_rank, groups = model.run_on_ranks(size, steps, depth)
    for results in by_rank:
        check_equal(results, expected)
    outside = [each for each in collectives_of(groups) if not each.is_captured]
    assert {each.name for each in outside} == {"gather"}, "only the head of a mixed pass is computed outside of graphs"


@pytest.mark.long
@settings(max_examples=6)
@given(seed=st.integers(0, 1 << 30), depth=st.integers(1, 3))
def test_any_mix_of_rows_has_the_tokens_of_one_process(model: DividedModel, seed: int, depth: int) -> None:
    """Also launched kernel by kernel, as before graphs are captured."""
    random_steps = model.random_steps(seed)
    steps = [random_steps.step(number) for number in range(4)]
    by_rank, groups = model.run_on_ranks(2, steps, depth, captured=False)
    for results in by_rank:
        check_equal(results, run_ahead(plain_runner(model.whole), steps))
    assert collectives_of(groups)


def test_a_capture_has_the_collectives_of_its_pass_in_their_order(model: DividedModel) -> None:
    """Capture on all ranks the same, the largest first: a sum behind the embedding and two in each layer."""

    def work(ranks: NcclRanks, group: ThreadCollectives, graphs: RecordedGraphs) -> int:
        runner = model.runner(ranks, graphs)
        before = len(group.calls)
        runner.capture_graphs()
        return before

    _, groups = on_all_ranks(2, work)
    calls = [each for each in collectives_of(groups) if each.is_captured]
    config, limits = model.whole.config, limits_for(model.whole)
    layer = ["gather", "gather", "sum", "sum"] if config.qk_norm_sizes[0] > config.head_dim else ["sum", "sum"]
    layers = ["sum", *layer * config.num_layers]
    kinds = (
        2 if None in config.sliding_windows else 1
    )  # of attention: with common prefixes, where a layer can share any
    mixed, decode = token_sizes(limits.max_batched_tokens), graph_sizes(limits.num_seats)
    expected = [layers] * (kinds * len(mixed)) + [[*layers, "gather"]] * (kinds * len(decode))
    assert [each.name for each in calls] == [name for names in expected for name in names]
    sums = [each.shape for each in calls if each.name == "sum"]
    assert sums[0] == (max(mixed), config.hidden_size)
    assert all(each.shape[1] == -(-config.vocab_size // 2) for each in calls[-1:])
