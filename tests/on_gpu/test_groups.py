"""Tensor-parallel groups on two GPUs, whose passes are graphs with NCCL's sums: answers as `transformers` gives them.

Without a GPU the same runner's ranks compute on the CPU, and reduce through shared memory.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from tests.equality import assert_equal_greedy
from tests.on_gpu.gpu_workers import DEVICE, Served, Variant, all_serving
from tests.on_gpu.test_families import LENGTHS, NUM_TOKENS, POOL, generate_all
from tests.rank_processes import assert_gone, ranks_of
from tests.worker.tiny_models import TINY_MODELS, random_prompts, reference_greedy, write_tiny_model

NUM_RANKS = 2
FAMILIES = (
    tuple(TINY_MODELS) if DEVICE == "cuda" else ("opt", "llama_mqa", "olmo2")
)  # two cores would be busy for minutes
SWAPS = ("--num-host-blocks", "30")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    return {family: write_tiny_model(family, base / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def served(folders: dict[str, Path]) -> Iterator[dict[str, Served]]:
    variants = {
        family: Variant(
            model=folder,
            worker_flags=("--dtype", "float32", "--tensor-parallel", str(NUM_RANKS), *POOL, *SWAPS),
            scheduler_flags=("--pipeline-depth", str(1 + index % 2)),
        )
        for index, (family, folder) in enumerate(folders.items())
    }
    with all_serving(variants) as served:
        yield served


@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_answers_as_transformers_does(family: str, folders: dict[str, Path], served: dict[str, Served]) -> None:
    prompts = random_prompts(LENGTHS, seed=1)
    reference = reference_greedy(folders[family], prompts, NUM_TOKENS)
    completions = asyncio.run(generate_all(served[family].ready_address(), prompts))
    assert_equal_greedy(reference.tokens, reference.margins, [list(each.token_ids) for each in completions])
    assert sum(each.usage.num_preemptions for each in completions) > 0


def test_a_group_ends_as_one_when_a_rank_is_killed(folders: dict[str, Path]) -> None:
    """Kernels of NCCL would wait for it for ever."""
    flags = ("--dtype", "float32", "--tensor-parallel", str(NUM_RANKS), *POOL)
    with all_serving({"struck": Variant(model=folders[FAMILIES[0]], worker_flags=flags)}) as served:
        struck = served["struck"]
        address, ranks = struck.ready_address(), ranks_of(struck.worker)

        async def kill_beside_requests() -> None:
            async with quire.AsyncClient(address) as client:
                await client.wait_ready(60)
                async with client.stream([5, 6, 7], max_tokens=200, temperature=0, ignore_eos=True) as stream:
                    await anext(aiter(stream))
                    os.kill(ranks[0], signal.SIGKILL)
                    await asyncio.to_thread(struck.worker.wait)

        asyncio.run(kill_beside_requests())
        assert_gone(ranks)
