"""One run of many requests against real services, what must hold after it, and when two runs answered the same."""

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass

import pytest

import quire
from tests.e2e.model_site import ModelSite, all_free
from tests.e2e.pressure_disturbance import disturbance
from tests.e2e.pressure_load import Ask, Margins
from tests.equality import MAX_CUT_FRACTION, NEAR_TIE, comparable_length, compare_tokens
from tests.patience import patient
from tests.services import Service

EXPECTED_WARNING = "NOT DURABLE"  # the journal of these runs is in memory


@dataclass(frozen=True, slots=True)
class Run:
    """Run with its completions and statistics."""

    completions: list[quire.Completion]
    stats: quire.Stats  # once all was free again

    @property
    def num_swaps(self) -> int:
        return sum(worker.num_swaps for worker in self.stats.workers)

    @property
    def num_preemptions(self) -> int:
        return sum(worker.num_preemptions for worker in self.stats.workers)

    @property
    def recomputed_tokens(self) -> int:
        return sum(worker.recomputed_tokens for worker in self.stats.workers)

    @property
    def copied_blocks(self) -> int:
        return sum(worker.copied_blocks for worker in self.stats.workers)

    def __str__(self) -> str:
        return (
            f"{self.num_preemptions} preemptions, {self.num_swaps} of them swaps, {self.recomputed_tokens} tokens "
            f"recomputed, {self.copied_blocks} blocks copied, {sum(w.num_steps for w in self.stats.workers)} steps"
        )


async def run_asks(
    site: ModelSite,
    asks: list[Ask],
    *flags: str,
    num_workers: int = 1,
    timeout_s: float = 60,
    disturbance_seed: int | None = None,
) -> Run:
    """Run all requests at once, under a scheduler with these flags. Nothing may fail, hang, leak or be logged as an
    error.

    With a seed, other things happen beside them.
    """
    async with (
        site.scheduler(*flags, num_workers=num_workers) as scheduler,
        quire.AsyncClient(site.address) as client,
        asyncio.timeout(patient(timeout_s)),
    ):
        await client.wait_ready()
        streams = [client.stream(ask.prompt, **ask.params()) for ask in asks]
        await asyncio.gather(*(stream.accepted() for stream in streams))
        async with nullcontext() if disturbance_seed is None else disturbance(client, asks, disturbance_seed):
            completions = await asyncio.gather(*(stream.completion() for stream in streams))
        run = Run(completions, await all_free(client))
    _assert_no_complaint(scheduler)
    if disturbance_seed is None:
        _assert_accounts_agree(run)
    print(run)  # noqa: T201 - what was done to make room
    return run


def _assert_no_complaint(scheduler: Service) -> None:
    complaints = [
        line
        for line in scheduler.lines
        if line["level"] not in ("debug", "info") and not line["event"].startswith(EXPECTED_WARNING)
    ]
    assert not complaints, complaints


def _assert_accounts_agree(run: Run) -> None:
    """Assert that the requests' counts add up to the workers' counts."""
    memory = [completion.memory for completion in run.completions]
    workers = run.stats.workers
    assert sum(each.copied_blocks for each in memory) == run.copied_blocks
    assert sum(each.recomputed_tokens for each in memory) == run.recomputed_tokens
    assert sum(each.swapped_out_blocks for each in memory) == sum(worker.swapped_out_blocks for worker in workers)
    assert sum(each.swapped_in_blocks for each in memory) == sum(worker.swapped_in_blocks for worker in workers)
    assert sum(each.usage.num_preemptions for each in run.completions) == run.num_preemptions
    for worker in workers:
        assert worker.swapped_in_blocks <= worker.swapped_out_blocks  # some end by a token that was still in flight
        assert worker.blocks.free + worker.blocks.cached == worker.blocks.total
        assert worker.blocks.pinned == worker.blocks.shared == worker.num_running == 0


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a run without pressure, and how sure the model was of them."""

    asks: list[Ask]
    completions: list[quire.Completion]
    margins: list[list[list[float]]]  # of each request's samples, a token each; none of beams
    model: Margins

    def assert_same(self, run: Run, max_cut_fraction: float = MAX_CUT_FRACTION) -> None:
        """Equal tokens up to the first near tie, scores and log-probabilities within 1e-4; cuts are fewer than that."""
        expected, margins, ours = [], [], []
        num_searches_cut = 0
        for index, ask in enumerate(self.asks):
            reference, answer = self.completions[index], run.completions[index]
            assert len(answer.samples) == len(reference.samples), f"request {index}"
            assert [s.finish_reason for s in answer.samples] == [s.finish_reason for s in reference.samples]
            if ask.beam_width is not None:
                num_searches_cut += self._is_search_cut(index, ask, answer)
                continue
            expected += [sample.token_ids for sample in reference.samples]
            margins += self.margins[index]
            ours += [sample.token_ids for sample in answer.samples]
            for sample, other, own_margins in zip(answer.samples, reference.samples, self.margins[index], strict=True):
                assert_same_logprobs(sample, other, comparable_length(own_margins))
        report = compare_tokens(expected, margins, ours)
        num_parted = sum(mine != other for mine, other in zip(ours, expected, strict=True))
        print(f"{report}, where {num_parted} parted; {num_searches_cut} searches parted at one")  # noqa: T201
        num_cuts = report.num_cuts + num_searches_cut
        num_searches = sum(ask.beam_width is not None for ask in self.asks)
        allowed = max_cut_fraction * (report.num_sequences + num_searches)
        assert num_cuts == 0 or num_cuts < allowed, f"{num_cuts} cuts, under {allowed} are allowed"

    def _is_search_cut(self, index: int, ask: Ask, answer: quire.Completion) -> bool:
        """A search is compared whole: after a near tie its beams may part anywhere."""
        reference = self.completions[index]
        if [s.token_ids for s in answer.samples] != [s.token_ids for s in reference.samples]:
            margin = self.model.of_search(ask)
            assert margin < NEAR_TIE, f"request {index}: other beams, where no scores were nearer than {margin:.2e}"
            return True
        for sample, other in zip(answer.samples, reference.samples, strict=True):
            assert sample.score == pytest.approx(other.score, abs=NEAR_TIE)
            assert_same_logprobs(sample, other, len(other.token_ids))
        return False


def assert_same_logprobs(sample: quire.Sample, reference: quire.Sample, length: int) -> None:
    """Compare log-probabilities of the first `length` tokens, if they were requested."""
    assert bool(sample.logprobs) == bool(reference.logprobs)
    ours = [each.logprob for each in sample.logprobs[:length]]
    assert ours == pytest.approx([each.logprob for each in reference.logprobs[:length]], abs=1e-4)


def answers_of(run: Run, asks: list[Ask], model: Margins) -> Answers:
    """The reference, once the model itself has been found to agree with it."""
    margins: list[list[list[float]]] = []
    for ask, completion in zip(asks, run.completions, strict=True):
        drawn = completion.samples if ask.beam_width is None else ()
        margins.append([model.of_sample(ask, sample.index, sample.token_ids) for sample in drawn])
        for own in margins[-1]:
            assert min(own[: comparable_length([abs(each) for each in own])], default=1.0) > 0
    return Answers(asks, run.completions, margins, model)
