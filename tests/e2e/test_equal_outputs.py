"""Answers of the services equal those of `transformers`, for any split of the work and on any worker.

One worker stays up over all cases of a model; each case starts a scheduler of its own on the same address, and the
worker finds it by itself.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import quire
from tests.equality import assert_equal_greedy
from tests.services import DEMO_MODEL, Service, free_address, start_scheduler, start_worker
from tests.worker.tiny_models import GreedyReference, random_prompts, reference_greedy, write_tiny_model

NUM_TOKENS = 64
LENGTHS = (1, 7, 16, 17, 40, 63, 90, 150)  # below, at and above the block size of 16 and the token budget
POOL = ("--num-blocks", "120")  # eight sequences of up to 214 tokens need 112 blocks
BUDGET = ("--max-batched-tokens", "48")  # prompts are computed in chunks, beside decoding

CASES = {
    "depth 2": (),
    "depth 1": ("--pipeline-depth", "1"),
    "no prefix cache": ("--no-prefix-cache",),
    "forced preemption": ("--preempt-every", "7"),
    "the paper's form of a step": ("--step-form", "whole"),
}


async def generate_all(address: str, prompts: list[list[int]], **params: object) -> list[quire.Completion]:
    async with quire.AsyncClient(address) as client:
        await client.wait_ready(60)
        return await asyncio.gather(
            *(
                client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, **params)  # type: ignore[arg-type]
                for prompt in prompts
            )
        )


def assert_answers_are(reference: GreedyReference, completions: list[quire.Completion]) -> None:
    assert all(each.finish_reason is quire.FinishReason.LENGTH for each in completions)
    assert_equal_greedy(reference.tokens, reference.margins, [list(each.token_ids) for each in completions])


class Site:
    """A model with its reference, and workers that look for a scheduler at one address."""

    def __init__(self, model: Path, vocab_size: int) -> None:
        torch.set_num_threads(1)
        self.address = free_address()
        self.prompts = [[token % vocab_size for token in prompt] for prompt in random_prompts(LENGTHS, seed=1)]
        self.reference = reference_greedy(model, self.prompts, NUM_TOKENS)
        self._model = model

    def start_worker(self, name: str, *arguments: str) -> Service:
        options = ("--worker-id", name, "--dtype", "float32", "--threads", "1")
        return start_worker(self.address, *options, *(arguments or POOL), model=self._model)

    def answers(self, *flags: str, num_workers: int = 1) -> tuple[list[quire.Completion], Service]:
        """Completions under a scheduler with these flags, which has ended by the time of return."""
        scheduler, _ = start_scheduler(*BUDGET, *flags, listen=self.address)
        with scheduler:
            scheduler.wait_for("worker ready", num_workers)
            completions = asyncio.run(generate_all(self.address, self.prompts))
            assert scheduler.stop() == 0
        return completions, scheduler


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site(DEMO_MODEL, vocab_size=2048)
    with site.start_worker("first"):
        yield site


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES.keys())
def test_answers_are_those_of_transformers(site: Site, flags: tuple[str, ...]) -> None:
    completions, _ = site.answers(*flags)
    assert_answers_are(site.reference, completions)
    if "--preempt-every" in flags:
        assert sum(each.usage.num_preemptions for each in completions) > 0


def test_answers_are_the_same_from_two_workers(site: Site) -> None:
    with site.start_worker("second"):
        completions, scheduler = site.answers(num_workers=2)
    assert_answers_are(site.reference, completions)
    assert len([line for line in scheduler.lines if line["event"] == "worker ready"]) == 2


@pytest.mark.parametrize("family", ["opt", "gpt2", "llama_gqa", "mistral", "qwen2", "qwen3", "olmo2"])
def test_every_family_answers_as_transformers_does(family: str, tmp_path: Path) -> None:
    model = write_tiny_model(family, tmp_path / family)
    site = Site(model, vocab_size=211)
    # A pool for about two of the eight sequences: preemption comes by itself.
    with site.start_worker("only", "--num-blocks", "30"):
        completions, _ = site.answers()
    assert_answers_are(site.reference, completions)


def test_a_seed_gives_the_same_text_whatever_runs_beside_it(site: Site) -> None:
    async def compare() -> None:
        async with quire.AsyncClient(site.address) as client:
            await client.wait_ready(60)
            alone = [await sample(client, seed) for seed in range(4)]
            crowd = [client.generate([seed + 5], max_tokens=40, seed=seed, temperature=1.5) for seed in range(20)]
            together = await asyncio.gather(*(sample(client, seed) for seed in range(4)), *crowd)
            assert [each.token_ids for each in alone] == [each.token_ids for each in together[:4]]
            assert len({tuple(each.token_ids) for each in alone}) == 4

    async def sample(client: quire.AsyncClient, seed: int) -> quire.Completion:
        return await client.generate("Once upon a time", max_tokens=40, seed=seed, temperature=0.9, top_p=0.95)

    with ExitStack() as stack:
        scheduler, _ = start_scheduler(*BUDGET, listen=site.address)
        stack.enter_context(scheduler)
        scheduler.wait_for("worker ready")
        asyncio.run(compare())
