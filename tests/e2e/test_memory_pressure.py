"""200 requests of every kind in a pool hardly larger than the largest of them: real services, a real model.

However memory was found for them, by swap, by computing again or by either, they answer as they do where there is
room for all, and leave nothing behind. `python -m tests.e2e.pressure_soak` looks at more than the suite has time for.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.e2e.model_site import ModelSite
from tests.e2e.pressure_load import Margins, Shape, mixed_asks
from tests.e2e.pressure_run import Answers, Run, answers_of, run_asks
from tests.worker.tiny_models import VOCAB_SIZE, write_tiny_model

NUM_REQUESTS = 200
SHAPE = Shape(vocab_size=VOCAB_SIZE)
BLOCK_SIZE = 8
BUDGET = ("--max-batched-tokens", "48")  # prompts are computed in chunks, beside decoding
AMPLE = ("--num-host-blocks", "2000")
SEED = 0


@dataclass(frozen=True, slots=True)
class Pressure:
    """A load, its answers where there is room, and sites where there is none."""

    answers: Answers
    pool: tuple[str, ...]  # options of a worker with 1.2 times what the largest request needs
    ample: ModelSite  # its host pool holds whatever is swapped out
    scarce: ModelSite  # its host pool is soon full

    def run(self, site: ModelSite, *flags: str, num_workers: int = 1) -> Run:
        """Run under a scheduler with these flags; the answers are the same."""
        run = asyncio.run(run_asks(site, self.answers.asks, *BUDGET, *flags, num_workers=num_workers))
        self.answers.assert_same(run)
        assert run.num_preemptions > 0 and run.copied_blocks > 0
        assert run.stats.blocks.prefix_hit_tokens > 0
        return run


@pytest.fixture(scope="module")
def pressure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pressure]:
    folder = write_tiny_model("llama_gqa", tmp_path_factory.mktemp("model"))
    asks = mixed_asks(SEED, NUM_REQUESTS, SHAPE)
    largest = max(ask.num_worst_case_blocks(BLOCK_SIZE) for ask in asks)
    pool = ("--block-size", str(BLOCK_SIZE), "--num-blocks", str(int(1.2 * largest)))
    roomy, ample, scarce = ModelSite(folder), ModelSite(folder), ModelSite(folder)
    with ExitStack() as stack:
        with roomy.start_worker("roomy", "--block-size", str(BLOCK_SIZE), "--num-blocks", "4000"):
            stack.enter_context(ample.start_worker("ample", *pool, *AMPLE))
            stack.enter_context(scarce.start_worker("scarce", *pool, "--num-host-blocks", str(largest // 2)))
            reference = asyncio.run(run_asks(roomy, asks, *BUDGET))
        assert reference.num_preemptions == 0
        yield Pressure(answers_of(reference, asks, Margins(roomy.reference)), pool, ample, scarce)


@pytest.mark.parametrize("depth", ["2", pytest.param("1", marks=pytest.mark.long)])
def test_swapped_requests_answer_as_those_that_never_gave_way(pressure: Pressure, depth: str) -> None:
    run = pressure.run(pressure.ample, "--preemption", "swap", "--pipeline-depth", depth)
    assert run.num_swaps > 0
    for ask, completion in zip(pressure.answers.asks, run.completions, strict=True):
        if completion.memory.recomputed_tokens:  # several samples preempted while the first of them computes the prompt
            assert ask.num_samples > 1 and ask.beam_width is None
            assert completion.memory.recomputed_tokens < len(ask.prompt) * completion.usage.num_preemptions


def test_recomputed_requests_answer_as_those_that_never_gave_way(pressure: Pressure) -> None:
    run = pressure.run(pressure.ample, "--preemption", "recompute")
    assert run.num_swaps == 0 and run.recomputed_tokens > 0


@pytest.mark.long
def test_either_way_by_cost_gives_the_same_answers(pressure: Pressure) -> None:
    run = pressure.run(pressure.scarce, "--preemption", "auto")
    assert run.num_swaps > 0 and run.recomputed_tokens > 0


def test_what_does_not_fit_into_the_host_pool_is_computed_again(pressure: Pressure) -> None:
    run = pressure.run(pressure.scarce, "--preemption", "swap")
    assert run.num_swaps > 0 and run.recomputed_tokens > 0


@pytest.mark.long
def test_two_workers_under_pressure_give_the_same_answers(pressure: Pressure) -> None:
    with pressure.ample.start_worker("second", *pressure.pool, *AMPLE):
        run = pressure.run(pressure.ample, "--preemption", "swap", num_workers=2)
    assert all(worker.num_swaps > 0 for worker in run.stats.workers)


@pytest.mark.long
def test_the_runner_of_accelerators_gives_the_same_answers(pressure: Pressure) -> None:
    """On a CPU with the torch references of its kernels: steps launched ahead, and tokens that stay on the device."""
    site = ModelSite(pressure.ample.folder)
    with site.start_worker("accelerated", "--runner", "device", *pressure.pool, *AMPLE):
        run = pressure.run(site, "--preemption", "swap")
    assert run.num_swaps > 0
