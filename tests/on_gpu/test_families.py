"""Variants of all families on the GPU answer in float32 as `transformers` does, preempted and at both depths."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from tests.equality import assert_equal_greedy
from tests.on_gpu.gpu_workers import DEVICE, Served, Variant, all_serving
from tests.worker.tiny_models import TINY_MODELS, random_prompts, reference_greedy, write_tiny_model

SOME = ("opt_350m_style", "llama_biases", "qwen2_window")
FAMILIES = tuple(TINY_MODELS) if DEVICE == "cuda" else SOME  # two cores would be busy for minutes
NUM_TOKENS = 48
LENGTHS = (1, 7, 16, 17, 40, 63, 90, 150)  # below, at and above the block size of 16 and the token budget
POOL = ("--num-blocks", "30")  # for about two of the eight sequences: preemption comes by itself


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("families")
    return {family: write_tiny_model(family, base / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def served(folders: dict[str, Path]) -> Iterator[dict[str, Served]]:
    variants = {
        family: Variant(
            model=folder,
            worker_flags=("--dtype", "float32", *POOL),
            scheduler_flags=("--pipeline-depth", str(1 + index % 2)),
        )
        for index, (family, folder) in enumerate(folders.items())
    }
    with all_serving(variants) as served:
        yield served


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_as_transformers_does(
    family: str, folders: dict[str, Path], served: dict[str, Served]
) -> None:
    prompts = random_prompts(LENGTHS, seed=1)
    reference = reference_greedy(folders[family], prompts, NUM_TOKENS)
    completions = asyncio.run(generate_all(served[family].ready_address(), prompts))
    assert_equal_greedy(reference.tokens, reference.margins, [list(each.token_ids) for each in completions])
    assert sum(each.usage.num_preemptions for each in completions) > 0


async def generate_all(address: str, prompts: list[list[int]]) -> list[quire.Completion]:
    async with quire.AsyncClient(address) as client:
        await client.wait_ready(60)
        return await asyncio.gather(
            *(client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True) for prompt in prompts)
        )
