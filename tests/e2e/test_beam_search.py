"""Beam search as a service finds what `transformers` finds, whatever runs beside it and however often it gives way.

Models are tiny random checkpoints of three families, with ends that their own searches reach at several lengths, and
the demo model with its own end and another. One worker of each stays up; each case starts a scheduler of its own.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import quire
from tests.e2e.beam_searches import all_searches, edited_searches, smaller_searches, some_searches
from tests.e2e.mixed_load import MixedLoad
from tests.e2e.model_site import ModelSite
from tests.scheduler.beam_reference import BeamReport
from tests.services import DEMO_MODEL
from tests.worker.tiny_models import random_prompts, write_tiny_model

# Seed of the checkpoint, and two tokens each that the best beams of a short and a long prompt reach: their ends.
FAMILIES = {
    "opt": (4, [53, 206], [37, 168]),
    "gpt2": (4, [25, 163], [128, 202]),
    "llama_gqa": (3, [25, 202], [3, 70]),
}
MAX_TOKENS = 16
DEMO_MAX_TOKENS = 20
QUESTION = "<|bos|><|user|>Thank you!<|assistant|>"
STORY = "<|bos|>One day Tom went to the river. He saw a big fish in the water and he wanted to"
ENDS = "<|eos|>."
BLOCK_SIZE = 16
OTHER_LENGTHS = (1, 15, 16, 17, 40)  # of greedy and sampled requests
POOL = ("--num-blocks", "100", "--num-host-blocks", "60")
BUDGET = ("--max-batched-tokens", "32")  # prompts are computed in chunks, beside decoding

Prompt = tuple[list[int], list[int]]  # and its ends


@pytest.fixture(scope="module")
def reports() -> Iterator[list[BeamReport]]:
    """One of each run; together they show that near ties are rare."""
    reports: list[BeamReport] = []
    yield reports
    sum(reports, BeamReport()).assert_cuts_are_rare()


def load_of(folder: Path, short: Prompt, long: Prompt, max_tokens: int, *, has_all: bool = False) -> MixedLoad:
    site = ModelSite(folder)
    searches = (all_searches if has_all else some_searches)(*short, max_tokens)
    searches += some_searches(*long, max_tokens)
    searches += smaller_searches(*short, max_tokens) + edited_searches(site.reference, *short, max_tokens)
    return MixedLoad.of(site, searches, random_prompts(OTHER_LENGTHS, seed=5))


def tiny_load(family: str, folder: Path) -> MixedLoad:
    seed, *ends = FAMILIES[family]
    short, long = (random_prompts([length], seed=3)[0] for length in (9, 37))
    model, has_all = write_tiny_model(family, folder, seed), family == "llama_gqa"
    return load_of(model, (short, ends[0]), (long, ends[1]), MAX_TOKENS, has_all=has_all)


def demo_load() -> MixedLoad:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    short, long, ends = (tokenizer.encode(text, add_special_tokens=False).ids for text in (QUESTION, STORY, ENDS))
    return load_of(DEMO_MODEL, (short, ends), (long, ends), DEMO_MAX_TOKENS)


@pytest.fixture(scope="module", params=[*FAMILIES, "demo"])
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedLoad]:
    family = request.param
    load = demo_load() if family == "demo" else tiny_load(family, tmp_path_factory.mktemp(family))
    with load.site.start_worker("w", *POOL):
        yield load


def num_preemptions(completions: Sequence[quire.Completion]) -> int:
    return sum(each.usage.num_preemptions for each in completions)


@pytest.mark.long
async def test_beams_alone_and_in_a_mixed_batch_are_those_of_transformers(
    load: MixedLoad, reports: list[BeamReport]
) -> None:
    searches = load.searches
    async with load.site.client(*BUDGET) as client:
        alone = [await searches.run(client, index) for index in range(len(searches.all))]
        mixed = await load.run(client, cache_salt="computed anew")
    reports += [searches.compare(alone), searches.compare(mixed)]
    assert reports[-1].num_ended > reports[-1].num_hypotheses / 2  # or the end was not put to the test
    assert num_preemptions(alone) == 0
    shared = [each.memory for each in alone if each.usage.prompt_tokens > BLOCK_SIZE]
    assert all(each.saved_blocks and each.copied_blocks for each in shared)


async def test_beams_that_give_way_to_others_and_are_computed_again_are_the_same(
    load: MixedLoad, reports: list[BeamReport]
) -> None:
    async with load.site.client(*BUDGET, "--preempt-every", "3", "--preemption", "recompute") as client:
        completions = await load.run(client)
    reports.append(load.searches.compare(completions))
    assert num_preemptions(completions) > 10
    assert any(each.memory.recomputed_tokens for each in completions)  # few: the cache keeps most of what they lost
    assert sum(each.memory.swapped_in_blocks for each in completions) == 0


async def test_beams_that_are_swapped_out_and_in_are_the_same_one_step_at_a_time(
    load: MixedLoad, reports: list[BeamReport]
) -> None:
    flags = ("--pipeline-depth", "1", "--preempt-every", "3", "--preemption", "swap")
    async with load.site.client(*BUDGET, *flags) as client:
        completions = await load.run(client)
    reports.append(load.searches.compare(completions))
    assert num_preemptions(completions) > 10
    assert sum(each.memory.swapped_in_blocks for each in completions) > 20
