"""Models of several families, each served by workers at both pipeline depths, and answers equal to `transformers`'."""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import quire
from tests.equality import assert_equal_greedy
from tests.on_gpu.gpu_workers import Served, Variant, all_serving
from tests.worker.tiny_models import random_prompts, reference_greedy, write_tiny_model

POOL = ("--num-blocks", "30")  # for about two of the eight sequences: preemption comes by itself
_NUM_TOKENS = 48
_LENGTHS = (1, 7, 16, 17, 40, 63, 90, 150)  # below, at and above the block size of 16 and the token budget


def own_share(families: Sequence[str], share: str | None = None) -> tuple[str, ...]:
    """The families of this process: all, or with `ON_GPU_FAMILIES=2/5` every fifth from the second on.

    Several processes, each with services of its own, are done sooner. Raises ValueError if the share is none.
    """
    number, _, count = (share or os.environ.get("ON_GPU_FAMILIES", "1/1")).partition("/")
    if not 1 <= int(number) <= int(count):
        raise ValueError(f"ON_GPU_FAMILIES must be such as 2/5, the second of five shares, not {number}/{count}")
    return tuple(families[int(number) - 1 :: int(count)])


def write_families(families: Sequence[str], base: Path) -> dict[str, Path]:
    """Folders of tiny models, by family."""
    return {family: write_tiny_model(family, base / family) for family in families}


@contextmanager
def families_serving(folders: Mapping[str, Path], *worker_flags: str) -> Iterator[dict[str, Served]]:
    """A worker in float32 for each family, with the small pool and more flags."""
    variants = {
        family: Variant(
            model=folder,
            worker_flags=("--dtype", "float32", *POOL, *worker_flags),
            scheduler_flags=("--pipeline-depth", str(1 + index % 2)),
        )
        for index, (family, folder) in enumerate(folders.items())
    }
    with all_serving(variants) as served:
        yield served


def assert_answers_as_transformers(served: Served, folder: Path) -> None:
    """Greedy answers of requests side by side, some of them preempted, are those of `transformers`."""
    prompts = random_prompts(_LENGTHS, seed=1)
    reference = reference_greedy(folder, prompts, _NUM_TOKENS)
    completions = asyncio.run(_generate_all(served.ready_address(), prompts))
    assert_equal_greedy(reference.tokens, reference.margins, [list(each.token_ids) for each in completions])
    assert sum(each.usage.num_preemptions for each in completions) > 0


async def _generate_all(address: str, prompts: list[list[int]]) -> list[quire.Completion]:
    async with quire.AsyncClient(address) as client:
        await client.wait_ready(60)
        return await asyncio.gather(
            *(client.generate(prompt, max_tokens=_NUM_TOKENS, temperature=0, ignore_eos=True) for prompt in prompts)
        )
