"""Requests of several samples and beam searches as their readers see them: while they run, and cut short."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import torch
from tokenizers import Tokenizer

import quire
from common.sampling_params import SequenceSampling
from quire.params import GenerateParams
from scheduler_svc.core.beam_search import BeamSearchParams
from tests.e2e.model_site import ModelSite, all_free
from tests.e2e.sampled_reference import Drawing, expected_sample
from tests.equality import compare_tokens
from tests.patience import MOST_ATTEMPTS
from tests.scheduler.beam_reference import reference_beams
from tests.services import DEMO_MODEL

STORY = "Lucy had a red ball."  # all beams tell the same for a while, and part again
ENDLESS = 1500  # tokens: many seconds
GRACE = ("--disconnect-grace-s", "0.2")
TIMEOUT_S = 2.0
DRAWN = SequenceSampling(seed=6, temperature=0.9)
CONTINUE = quire.OnDisconnect.CONTINUE


@pytest.fixture(scope="module")
def story() -> list[int]:
    return list(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(STORY).ids)


@pytest.fixture(scope="module")
def site() -> Iterator[ModelSite]:
    site = ModelSite(DEMO_MODEL)
    with site.start_worker("w", "--num-blocks", "1600"):
        yield site


@pytest.fixture
async def client(site: ModelSite) -> AsyncIterator[quire.AsyncClient]:
    async with site.client(*GRACE) as client:
        yield client


def model_logprobs(site: ModelSite, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(site.reference(torch.tensor([token_ids])).logits[0].float(), -1)


async def test_what_all_beams_agree_on_streams_before_the_end_and_never_changes(
    site: ModelSite, client: quire.AsyncClient, story: list[int]
) -> None:
    params = BeamSearchParams(beam_width=4, num_return=2, max_tokens=40, eos_token_ids=frozenset())
    stream = client.stream(story, beam_width=4, n=2, max_tokens=40, ignore_eos=True, logprobs=0)
    chunks = [chunk async for chunk in stream]
    early = [chunk for chunk in chunks if chunk.finish is None]
    assert {chunk.index for chunk in early} == {0}
    best, second = reference_beams(site.reference, story, params).token_ids[:2]
    sent = tuple(token for chunk in early for token in chunk.token_ids)
    assert 10 < len(sent) < 40
    assert best[: len(sent)] == second[: len(sent)] == sent
    assert [chunk.index for chunk in chunks[len(early) :]] == [0, 1]
    last, other = chunks[len(early) :]
    assert (last.position, other.position) == (len(sent), 0)
    assert sent + tuple(last.token_ids) == best
    assert tuple(other.token_ids) == second
    record = await client.get(stream.request_id)
    assert "".join(chunk.text for chunk in chunks if chunk.index == 0) == record.samples[0].text
    assert record.samples[0].text.startswith("".join(chunk.text for chunk in early))
    assert record.timings.first_token_s is not None and record.timings.finished_s is not None
    assert record.timings.first_token_s < record.timings.finished_s


@pytest.mark.parametrize("penalty", [1.0, 1.3])
async def test_log_probabilities_of_beams_are_the_models_own(
    site: ModelSite, client: quire.AsyncClient, story: list[int], penalty: float
) -> None:
    completion = await client.generate(
        story, beam_width=4, n=4, max_tokens=24, repetition_penalty=penalty, logprobs=2, prompt_logprobs=0
    )
    assert len(completion.samples) == 4
    for sample in completion.samples:
        rows = model_logprobs(site, [*story, *sample.token_ids])[len(story) - 1 : -1]
        own = rows.gather(1, torch.tensor(sample.token_ids)[:, None])
        assert [each.token_id for each in sample.logprobs] == list(sample.token_ids)
        assert [each.logprob for each in sample.logprobs] == pytest.approx(own[:, 0].tolist(), abs=1e-4)
        assert [each.rank for each in sample.logprobs] == ((rows > own).sum(-1) + 1).tolist()
        best = rows.topk(2).values
        assert [[value for _, value in each.top] for each in sample.logprobs] == [
            pytest.approx(row, abs=1e-4) for row in best.tolist()
        ]
        is_score = sample.score == pytest.approx(float(own.mean()), abs=1e-4)
        assert is_score == (penalty == 1.0)  # scores are of what was edited
    prompt_rows = model_logprobs(site, story)[:-1].gather(1, torch.tensor(story[1:])[:, None])
    assert [each.logprob for each in completion.prompt_logprobs] == pytest.approx(prompt_rows[:, 0].tolist(), abs=1e-4)


class Reading:
    """A stream of a request and what was read of it; every position comes once, in order."""

    def __init__(self, stream: quire.CompletionStream) -> None:
        self.tokens: dict[int, list[int]] = {}  # by sample
        self.finishes: dict[int, quire.Finish] = {}
        self._stream = stream

    async def read_tokens(self, num_tokens: int, samples: range) -> None:
        """Read until each of the samples has this many tokens."""
        while any(len(self.tokens.get(index, ())) < num_tokens for index in samples):
            self._take(await anext(self._stream))

    async def read_finish(self) -> None:
        """Read until a sample has ended."""
        while not self.finishes:
            self._take(await anext(self._stream))

    async def read_all(self) -> None:
        """Read to the end, which is expected to raise."""
        async for chunk in self._stream:
            self._take(chunk)

    def assert_recorded(self, record: quire.RequestRecord) -> None:
        """A record says what was read, and no more."""
        assert {each.index: list(each.token_ids) for each in record.samples} == self.tokens
        assert {each.index: each.finish for each in record.samples} == self.finishes

    def _take(self, chunk: quire.Chunk) -> None:
        tokens = self.tokens.setdefault(chunk.index, [])
        assert chunk.position == len(tokens)
        assert chunk.index not in self.finishes
        tokens.extend(chunk.token_ids)
        if chunk.finish is not None:
            self.finishes[chunk.index] = chunk.finish


def assert_drawn_so_far(site: ModelSite, drawing: Drawing, reading: Reading) -> None:
    for index, tokens in reading.tokens.items():
        expected = expected_sample(site.reference, drawing.prompt, tokens, drawing.alone(index).sampling)
        compare_tokens([expected.token_ids], [expected.margins], [tokens])


def assert_found_so_far(site: ModelSite, story: list[int], reading: Reading) -> None:
    """Two live beams of one search, best first; each is scored by its mean log-probability."""
    scores = []
    for index in range(2):
        tokens = reading.tokens[index]
        rows = model_logprobs(site, [*story, *tokens])[len(story) - 1 : -1]
        scores.append(float(rows.gather(1, torch.tensor(tokens)[:, None]).mean()))
    assert len(reading.tokens[0]) == len(reading.tokens[1])
    assert reading.tokens[0] != reading.tokens[1]
    assert scores[0] > scores[1]
    assert [reading.finishes[index].score for index in range(2)] == pytest.approx(scores, abs=1e-4)


async def test_a_cancelled_group_keeps_what_its_samples_have_and_how_one_ended_before(
    site: ModelSite, client: quire.AsyncClient, story: list[int]
) -> None:
    drawing = Drawing(story, DRAWN, ENDLESS, n=4)
    probe = await client.generate(story, **(drawing.request() | {"max_tokens": 12}))
    others = {token for index in (0, 2, 3) for token in probe.samples[index].token_ids}
    stop = next(token for token in probe.samples[1].token_ids[4:] if token not in others)
    stream = client.stream(story, **(drawing.request() | {"stop_token_ids": [stop]}))
    reading = Reading(stream)
    await reading.read_finish()
    assert await client.cancel(stream.request_id) is quire.RequestState.CANCELLED
    with pytest.raises(quire.RequestCancelledError):
        await reading.read_all()
    record = await client.get(stream.request_id)
    assert record.state is quire.RequestState.CANCELLED
    reading.assert_recorded(record)
    assert_drawn_so_far(site, drawing, reading)
    assert reading.finishes.pop(1).cause == quire.StopCause(stop_token_id=stop)
    assert {each.reason for each in reading.finishes.values()} == {quire.FinishReason.CANCELLED}
    assert [reading.finishes[index].sample_index for index in (0, 2, 3)] == [0, 2, 3]
    await all_free(client)


async def test_a_cancelled_search_gives_the_best_it_has_and_goes_on_from_what_was_sent(
    site: ModelSite, client: quire.AsyncClient, story: list[int]
) -> None:
    stream = client.stream(story, beam_width=4, n=2, max_tokens=ENDLESS, ignore_eos=True)
    reading = Reading(stream)
    await reading.read_tokens(1, range(1))
    num_sent = len(reading.tokens[0])
    assert await client.cancel(stream.request_id) is quire.RequestState.CANCELLED
    with pytest.raises(quire.RequestCancelledError):
        await reading.read_all()
    record = await client.get(stream.request_id)
    assert record.state is quire.RequestState.CANCELLED
    reading.assert_recorded(record)
    assert len(reading.tokens[0]) > num_sent > 0
    assert {each.reason for each in reading.finishes.values()} == {quire.FinishReason.CANCELLED}
    assert_found_so_far(site, story, reading)
    await all_free(client)


async def test_cancelled_samples_that_were_to_be_ranked_come_back_ranked(
    site: ModelSite, client: quire.AsyncClient, story: list[int]
) -> None:
    """Clients see nothing of such samples before the end, so another request beside them shows that they run."""
    drawing = Drawing(story, DRAWN, ENDLESS, n=4)
    ranked = client.stream(story, **(drawing.request() | {"n": 2, "best_of": 4}))
    witness = client.stream(story, **drawing.request())
    await Reading(witness).read_tokens(8, range(4))
    assert (await client.get(ranked.request_id)).samples == ()
    for stream in (ranked, witness):
        assert await client.cancel(stream.request_id) is quire.RequestState.CANCELLED
    reading = Reading(ranked)
    with pytest.raises(quire.RequestCancelledError):
        await reading.read_all()
    reading.assert_recorded(await client.get(ranked.request_id))
    means = []
    for index, finish in reading.finishes.items():
        own = drawing.alone(finish.sample_index)
        expected = expected_sample(site.reference, story, reading.tokens[index], own.sampling)
        compare_tokens([expected.token_ids], [expected.margins], [reading.tokens[index]])
        means.append(sum(expected.logprobs) / len(expected.logprobs))
    assert means == sorted(means, reverse=True)
    assert [each.score for each in reading.finishes.values()] == pytest.approx(means, abs=1e-4)
    assert {each.reason for each in reading.finishes.values()} == {quire.FinishReason.CANCELLED}
    assert list(reading.finishes) == [0, 1]


async def test_what_is_cancelled_before_it_ran_has_samples_without_tokens(site: ModelSite, story: list[int]) -> None:
    """Four sequences fit, and the first request has them."""
    async with site.client("--max-num-seqs", "4") as client:
        running = client.stream(story, n=4, max_tokens=ENDLESS, ignore_eos=True)
        await Reading(running).read_tokens(1, range(4))
        group = client.stream(story, n=3, max_tokens=ENDLESS)
        beams = client.stream(story, beam_width=4, n=2, max_tokens=ENDLESS)
        for stream in (group, beams):
            await stream.accepted()
            assert (await client.get(stream.request_id)).state is quire.RequestState.WAITING
            assert await client.cancel(stream.request_id) is quire.RequestState.CANCELLED
            with pytest.raises(quire.RequestCancelledError, match="after 0 tokens"):
                await stream.completion()
        samples = (await client.get(group.request_id)).samples
        assert [(each.index, each.token_ids) for each in samples] == [(0, ()), (1, ()), (2, ())]
        (only,) = (await client.get(beams.request_id)).samples
        assert only.token_ids == ()
        assert only.finish is not None and only.finish.reason is quire.FinishReason.CANCELLED
        assert (await client.get(running.request_id)).state is quire.RequestState.RUNNING
        await client.cancel(running.request_id)


async def test_a_deadline_ends_all_samples_and_keeps_what_is_there(
    site: ModelSite, client: quire.AsyncClient, story: list[int]
) -> None:
    drawing = Drawing(story, DRAWN, ENDLESS, n=4)
    for attempt in range(MOST_ATTEMPTS):
        readings = await expired(client, drawing, TIMEOUT_S * 2**attempt)
        if all(
            len(each.tokens) == num and all(each.tokens.values()) for each, num in zip(readings, (4, 2), strict=True)
        ):
            break  # else this machine was too busy to compute anything in that time
    assert_drawn_so_far(site, drawing, readings[0])
    assert_found_so_far(site, story, readings[1])
    await all_free(client)


async def expired(client: quire.AsyncClient, drawing: Drawing, timeout_s: float) -> list[Reading]:
    """Four samples and a search that have this time, as they were read and recorded."""
    drawn = client.stream(drawing.prompt, **(drawing.request() | {"timeout_s": timeout_s}))
    search: GenerateParams = {"beam_width": 4, "n": 2, "max_tokens": ENDLESS, "ignore_eos": True}
    found = client.stream(drawing.prompt, **(search | {"timeout_s": timeout_s, "on_disconnect": CONTINUE}))
    readings = [Reading(drawn), Reading(found)]
    ends = await asyncio.gather(*(each.read_all() for each in readings), return_exceptions=True)
    assert [type(each) for each in ends] == [quire.RequestExpiredError] * 2
    for stream, reading in zip((drawn, found), readings, strict=True):
        record = await client.get(stream.request_id)
        assert record.state is quire.RequestState.EXPIRED
        reading.assert_recorded(record)
        assert {each.reason for each in reading.finishes.values()} == {quire.FinishReason.DEADLINE}
    return readings


async def test_without_a_reader_groups_end_after_their_grace_or_go_on_as_was_asked(
    site: ModelSite, story: list[int]
) -> None:
    kept = Drawing(story, DRAWN, 100, n=4)
    params = BeamSearchParams(beam_width=4, num_return=4, max_tokens=60, eos_token_ids=frozenset())
    async with site.scheduler(*GRACE) as scheduler:
        async with quire.AsyncClient(site.address) as leaver:
            await leaver.wait_ready(60)
            streams = {
                "lost": leaver.stream(story, n=4, max_tokens=ENDLESS, ignore_eos=True),
                "lost search": leaver.stream(story, beam_width=4, max_tokens=ENDLESS, ignore_eos=True),
                "kept": leaver.stream(story, **(kept.request() | {"on_disconnect": CONTINUE})),
                "kept search": leaver.stream(
                    story, beam_width=4, n=4, max_tokens=60, ignore_eos=True, on_disconnect=CONTINUE
                ),
            }
            await Reading(streams["lost"]).read_tokens(3, range(4))
            await Reading(streams["lost search"]).read_tokens(1, range(1))
        await asyncio.to_thread(scheduler.wait_for, "request ended", 4)
        async with quire.AsyncClient(site.address) as client:
            records = {name: await client.get(stream.request_id) for name, stream in streams.items()}
            await all_free(client)
    assert records["lost"].state is records["lost search"].state is quire.RequestState.CANCELLED
    assert all(len(each.token_ids) >= 3 for each in records["lost"].samples)
    assert records["lost search"].token_ids
    assert records["kept"].state is records["kept search"].state is quire.RequestState.FINISHED
    for sample in records["kept"].samples:
        expected = expected_sample(site.reference, story, sample.token_ids, kept.alone(sample.index).sampling)
        compare_tokens([expected.token_ids], [expected.margins], [sample.token_ids])
        assert len(sample.token_ids) == kept.num_tokens
    found = [each.token_ids for each in records["kept search"].samples]
    assert found == reference_beams(site.reference, story, params).token_ids
