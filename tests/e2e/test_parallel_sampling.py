"""Samples of one request are what they would be alone: same tokens, same log-probabilities, same text, same ends."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise, product

import pytest
from tokenizers import Tokenizer

import quire
from common.sampling_params import SequenceSampling
from quire.params import GenerateParams
from tests.e2e.model_site import ModelSite
from tests.e2e.sampled_reference import Drawing, assert_drawn, assert_logprobs_close
from tests.equality import compare_tokens
from tests.services import DEMO_MODEL
from tests.worker.tiny_models import random_prompts

NUM_TOKENS = 24
BLOCK_SIZE = 16
LENGTHS = (1, 15, 16, 17, 40)  # of prompts: below, at and above a block
STORY = "One day Tom went to the river."
KINDS = (
    SequenceSampling(seed=1),
    SequenceSampling(seed=2, temperature=0.7, top_p=0.9),
    SequenceSampling(
        seed=3, sample_index=5, temperature=1.3, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
    ),
)
CASES = {
    "depth 2": (),
    "depth 2, recomputed": ("--preempt-every", "4", "--preemption", "recompute"),
    "the paper's form of a step, swapped": (
        *("--step-form", "whole", "--pipeline-depth", "1", "--preempt-every", "4", "--preemption", "swap"),
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def site() -> Iterator[ModelSite]:
    site = ModelSite(DEMO_MODEL)
    with site.start_worker("w", "--num-blocks", "400", "--num-host-blocks", "100"):
        yield site


@pytest.fixture
async def client(site: ModelSite) -> AsyncIterator[quire.AsyncClient]:
    async with site.client("--max-batched-tokens", "64") as client:
        yield client


async def draw_all(client: quire.AsyncClient, drawings: Sequence[Drawing]) -> list[quire.Completion]:
    return await asyncio.gather(*(client.generate(each.prompt, **each.request()) for each in drawings))


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES.keys())
async def test_sample_i_of_a_request_is_a_request_that_begins_with_sample_i(
    site: ModelSite, flags: tuple[str, ...]
) -> None:
    prompts = random_prompts(LENGTHS, seed=9)
    kinds = [(n, sampling) for n, sampling in product((2, 4, 8), KINDS)]
    groups = [Drawing(prompts[i % 5], sampling, NUM_TOKENS, n) for i, (n, sampling) in enumerate(kinds)]
    singles = [group.alone(index) for group in groups for index in range(group.n)]
    async with site.client("--max-batched-tokens", "64", *flags) as client:
        completions = await draw_all(client, groups + singles)
    together, alone = completions[: len(groups)], completions[len(groups) :]
    expected = assert_drawn(site.reference, groups, together)
    for each, single in zip(expected, alone, strict=True):
        compare_tokens([each.token_ids], [each.margins], [single.token_ids])
        assert_logprobs_close(each, single.samples[0])
    assert [single.samples[0].sample_index for single in alone] == [
        sample.sample_index for completion in together for sample in completion.samples
    ]
    assert all(len({each.token_ids for each in completion.samples}) > 1 for completion in together)
    num_preemptions = sum(each.usage.num_preemptions for each in together)
    assert (num_preemptions > 0) == bool(flags)


async def test_the_prompt_is_held_once_and_its_last_block_copied_unless_it_is_full(
    site: ModelSite, client: quire.AsyncClient
) -> None:
    drawings = [Drawing(prompt, KINDS[0], NUM_TOKENS, n=4) for prompt in random_prompts(LENGTHS, seed=4)]
    completions = await draw_all(client, drawings)
    assert_drawn(site.reference, drawings, completions)
    for length, completion in zip(LENGTHS, completions, strict=True):
        num_shared = length // BLOCK_SIZE
        num_blocks_alone = -(-(length + NUM_TOKENS - 1) // BLOCK_SIZE)  # the last token is not computed any more
        memory = completion.memory
        assert memory.copied_blocks == (3 if length % BLOCK_SIZE else 0)
        assert (memory.shared_blocks, memory.saved_blocks) == (num_shared, 3 * num_shared)
        assert memory.blocks == num_shared + 4 * (num_blocks_alone - num_shared)


async def test_samples_stream_by_turns_and_their_chunks_make_the_text(
    client: quire.AsyncClient, tokenizer: Tokenizer
) -> None:
    stream = client.stream(STORY, n=4, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
    chunks = [chunk async for chunk in stream]
    record = await client.get(stream.request_id)
    first_end = next(place for place, chunk in enumerate(chunks) if chunk.finish is not None)
    assert {chunk.index for chunk in chunks[:first_end]} == {0, 1, 2, 3}
    prompt = tokenizer.encode(STORY).ids
    for sample in record.samples:
        own = [chunk for chunk in chunks if chunk.index == sample.index]
        assert [chunk.position for chunk in own] == [sum(c.num_tokens for c in own[:i]) for i in range(len(own))]
        assert [chunk.finish for chunk in own] == [None] * (len(own) - 1) + [sample.finish]
        assert tuple(token for chunk in own for token in chunk.token_ids) == sample.token_ids
        text = "".join(chunk.text for chunk in own)
        assert text == sample.text
        assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *sample.token_ids])
        assert len(own) > 2  # as it was made


async def test_the_n_best_are_those_with_the_highest_mean_log_probability(
    client: quire.AsyncClient, tokenizer: Tokenizer
) -> None:
    """Sentences end by themselves, at several lengths."""
    params = quire.SamplingParams(seed=8, temperature=1.1)
    sentence = quire.StopParams(stop_token_ids=tokenizer.encode(".", add_special_tokens=False).ids, max_tokens=40)
    best, *singles = await asyncio.gather(
        client.generate(STORY, sampling=params, stopping=sentence, n=3, best_of=8, request_id="best"),
        *(
            client.generate(STORY, sampling=params, stopping=sentence, first_sample_index=i, logprobs=0)
            for i in range(8)
        ),
    )
    means = [sum(each.logprob for each in single.logprobs) / len(single.logprobs) for single in singles]
    order = sorted(range(8), key=lambda i: means[i], reverse=True)
    assert min(means[a] - means[b] for a, b in pairwise(order[:4])) > 1e-3  # a clear case
    assert sorted(order[:3]) != [0, 1, 2]
    assert [each.sample_index for each in best.samples] == order[:3]
    assert [each.token_ids for each in best.samples] == [singles[i].token_ids for i in order[:3]]
    assert [each.text for each in best.samples] == [singles[i].text for i in order[:3]]
    assert [each.score for each in best.samples] == pytest.approx([means[i] for i in order[:3]], abs=1e-4)
    assert all(not each.logprobs for each in best.samples)  # they were not asked for
    assert len({len(each.token_ids) for each in singles}) > 2
    assert best.usage.completion_tokens == sum(len(each.token_ids) for each in best.samples)
    record = await client.get("best")
    assert [each.token_ids for each in record.samples] == [each.token_ids for each in best.samples]


async def test_ranked_samples_are_sent_when_all_have_ended(client: quire.AsyncClient) -> None:
    chunks = [chunk async for chunk in client.stream(STORY, n=2, best_of=4, seed=1, max_tokens=NUM_TOKENS)]
    assert [(chunk.index, chunk.position) for chunk in chunks] == [(0, 0), (1, 0)]
    scores = [chunk.finish.score for chunk in chunks if chunk.finish is not None and chunk.finish.score is not None]
    assert len(scores) == 2
    assert scores[0] >= scores[1]


async def test_samples_that_meet_a_stop_string_at_different_times_end_as_they_would_alone(
    site: ModelSite, client: quire.AsyncClient, tokenizer: Tokenizer
) -> None:
    drawing = Drawing(tokenizer.encode(STORY).ids, SequenceSampling(seed=6, temperature=0.9), num_tokens=60, n=4)
    alone = [drawing.alone(index) for index in range(4)]
    stop: GenerateParams = {"stop": [".", "the "]}
    together, *singles = await asyncio.gather(
        *(client.generate(each.prompt, **(each.request() | stop)) for each in (drawing, *alone)),
    )
    assert len({len(each.token_ids) for each in together.samples}) == 4
    causes = {each.stop_cause for each in together.samples}
    assert causes == {quire.StopCause(stop_string=each) for each in stop["stop"]}
    for sample, single in zip(together.samples, singles, strict=True):
        expected = drawing.expected(site.reference, sample)
        report = compare_tokens([expected.token_ids], [expected.margins], [sample.token_ids])
        assert report.num_cuts == 0
        assert (sample.token_ids, sample.text) == (single.token_ids, single.text)
        assert (sample.finish_reason, sample.stop_cause) == (single.finish_reason, single.stop_cause)
        assert sample.text and not any(each in sample.text for each in stop["stop"])
    assert together.usage.completion_tokens == sum(each.usage.completion_tokens for each in singles)
