"""Keys and values in int8, on real services: samples share and swap blocks, and answer as they would alone."""

import asyncio
from collections.abc import Iterator
from itertools import product

import pytest

from common.sampling_params import SequenceSampling
from tests.e2e.model_site import ModelSite
from tests.e2e.sampled_reference import Drawing
from tests.services import DEMO_MODEL, Service
from tests.worker.tiny_models import random_prompts

NUM_TOKENS = 24
PROMPTS = random_prompts((1, 15, 16, 17, 40), seed=9)  # below, at and above a block
GROUPS = [Drawing(prompt, SequenceSampling(seed=seed), NUM_TOKENS, n=2) for seed, prompt in product((1, 2), PROMPTS)]
CASES = {"undisturbed": (), "swapped": ("--preempt-every", "4", "--preemption", "swap")}


@pytest.fixture(scope="module")
def site() -> ModelSite:
    return ModelSite(DEMO_MODEL)


@pytest.fixture(scope="module")
def worker(site: ModelSite) -> Iterator[Service]:
    with site.start_worker("w", "--kv-dtype", "int8", "--num-blocks", "200", "--num-host-blocks", "100") as worker:
        yield worker


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES.keys())
async def test_forked_samples_answer_as_they_would_alone_and_near_the_model(
    site: ModelSite, worker: Service, flags: tuple[str, ...]
) -> None:
    alone = [group.alone(index) for group in GROUPS for index in range(group.n)]
    async with site.client("--max-batched-tokens", "64", *flags) as client:
        drawings = [*GROUPS, *alone]
        completions = await asyncio.gather(*(client.generate(each.prompt, **each.request()) for each in drawings))
        stats = await client.stats()
    assert worker.wait_for("ready")["kv_dtype"] == "int8"
    together, singles = completions[: len(GROUPS)], completions[len(GROUPS) :]
    samples = [sample for completion in together for sample in completion.samples]
    assert [each.token_ids for each in samples] == [single.samples[0].token_ids for single in singles]
    assert sum(completion.memory.copied_blocks for completion in together) > 0
    assert (sum(each.num_swaps for each in stats.workers) > 0) == bool(flags)
    differences = []
    for single, drawing in zip(singles, alone, strict=True):
        expected = drawing.expected(site.reference, single.samples[0]).logprobs
        found = [each.logprob for each in single.samples[0].logprobs]
        differences += [abs(a - b) for a, b in zip(expected, found, strict=True)]
    assert sum(differences) / len(differences) < 0.02
