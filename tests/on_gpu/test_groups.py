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
from tests.on_gpu.families import POOL, assert_answers_as_transformers, families_serving, write_families
from tests.on_gpu.gpu_workers import DEVICE, Served, Variant, all_serving
from tests.rank_processes import assert_gone, ranks_of
from tests.worker.tiny_models import TINY_MODELS

GROUP = ("--tensor-parallel", "2")
SOME = ("opt", "llama_mqa", "olmo2")
FAMILIES = tuple(TINY_MODELS) if DEVICE == "cuda" else SOME  # two cores would be busy for minutes
SWAPS = ("--num-host-blocks", "30")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_families(FAMILIES, tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def served(folders: dict[str, Path]) -> Iterator[dict[str, Served]]:
    with families_serving(folders, *GROUP, *SWAPS) as served:
        yield served


@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_answers_as_transformers_does(family: str, folders: dict[str, Path], served: dict[str, Served]) -> None:
    assert_answers_as_transformers(served[family], folders[family])


def test_a_group_ends_as_one_when_a_rank_is_killed(folders: dict[str, Path]) -> None:
    """Kernels of NCCL would wait for it for ever."""
    flags = ("--dtype", "float32", *GROUP, *POOL)
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
