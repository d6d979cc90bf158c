"""Steps that sample and rank with all kinds of parameters, computed on the device and as the host computes them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.sampling_params import SequenceSampling
from common.step import LogprobRows, SequenceState, StepResult
from tests.worker import reference_sampler
from tests.worker.reference_candidates import rank_candidates
from tests.worker.reference_edits import TokenHistory
from worker_svc.operations import Operations
from worker_svc.sampling.candidates import CandidateRanker
from worker_svc.sampling.logprob_rows import logprob_rows
from worker_svc.sampling.sampler import PackedSampling, Sampler
from worker_svc.sampling.sampling_columns import SamplingColumns
from worker_svc.steps.step_upload import StepUpload
from worker_svc.steps.streams import DeviceEvent

NUM_SEATS, WIDTH = 24, 40


def random_sampling(generator: random.Random, vocab_size: int) -> SequenceSampling:
    """Each parameter is off more often than not, so that all mixes of them occur."""

    def maybe(off: Any, *on: Any) -> Any:
        return off if generator.random() < 0.6 else generator.choice(on)

    def some_ids(most: int) -> tuple[int, ...]:
        return tuple(generator.sample(range(vocab_size), min(vocab_size, generator.randint(1, most))))

    return SequenceSampling(
        seed=generator.randrange(2**64),
        sample_index=generator.randrange(4),
        allowed_token_ids=maybe(None, (), some_ids(30)),
        suppressed_token_ids=maybe((), some_ids(5)),
        suppressed_until=generator.choice([0, WIDTH // 2, WIDTH]),
        logit_bias=maybe((), tuple((token, generator.uniform(-5, 5)) for token in some_ids(4) * 2)),
        repetition_penalty=maybe(1.0, 0.8, 1.5),
        presence_penalty=maybe(0.0, 0.7, -0.4),
        frequency_penalty=maybe(0.0, 0.3, -0.2),
        temperature=generator.choice([0.0, 1.0, 0.3, 2.0, 1e-20, 1e20]),
        min_p=maybe(0.0, 0.05, 1.0),
        top_k=maybe(None, 1, 5, vocab_size, 10**6),
        top_p=maybe(1.0, 0.9, 0.3, 1e-9),
        num_logprobs=maybe(None, 0, 3, 500),
    )


@dataclass
class SamplingCase:
    """Seats that stand anywhere, whose tokens are known, and logits of which one row may serve several seats."""

    operations: Operations
    samplings: list[SequenceSampling]
    seed: int
    vocab_size: int = 101
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    may_wait: bool = True  # for the device, before answers are looked at

    def __post_init__(self) -> None:
        generator = random.Random(self.seed)
        count = len(self.samplings)
        self.seats = np.array(generator.sample(range(NUM_SEATS), count))
        self.positions = np.array([generator.randint(1, WIDTH) for _ in range(count)])
        self.num_prompt = [generator.randint(0, position) for position in self.positions.tolist()]
        num_rows = max(1, count - 2)
        self.logit_rows = np.array([generator.randrange(num_rows) for _ in range(count)])
        noise = torch.Generator().manual_seed(self.seed)
        self.logits = torch.randn(num_rows, self.vocab_size, generator=noise) * 3
        if generator.random() < 0.5:
            self.logits = self.logits.round()
        tokens = torch.randint(0, self.vocab_size, (NUM_SEATS, WIDTH), generator=noise, dtype=torch.int32)
        self.tokens = tokens.to(self.device)
        self.columns = SamplingColumns(NUM_SEATS, self.vocab_size)
        self.columns.apply(
            [
                SequenceState(
                    seat=seat, position=0, block_table=(), token_ids=(), num_prompt_tokens=num_prompt, sampling=sampling
                )
                for seat, num_prompt, sampling in zip(self.seats.tolist(), self.num_prompt, self.samplings, strict=True)
            ],
        )
        self.upload = StepUpload(self.device, {}, 1 << 14)

    def histories(self) -> list[TokenHistory | None]:
        table = self.tokens.cpu()
        return [
            TokenHistory(table[seat, :position], num_prompt)
            for seat, position, num_prompt in zip(
                self.seats.tolist(), self.positions.tolist(), self.num_prompt, strict=True
            )
        ]

    def packed(self) -> PackedSampling:
        self.upload.begin()
        packed = self._sampler().pack(self.upload, self.seats, self.positions, self.logit_rows)
        assert packed is not None
        self.upload.send()
        return packed

    def sampled_on_device(self) -> StepResult:
        logits, result = self.device_logits(), empty_result()
        with self._waiting():
            samples = self._sampler().launch(logits, self.packed(), self.tokens)
            fetched = samples.fetch()
        assert samples.chosen.token_ids.dtype == torch.int32
        self._wait()
        fetched.fill_result(result)
        return result

    def device_logits(self) -> Tensor:
        """Logits on the device, as the model leaves them."""
        return self.logits.to(self.device)

    def sampled_on_host(self) -> StepResult:
        rows = self.logits[torch.from_numpy(self.logit_rows)]
        output = reference_sampler.Sampler().sample(rows, self.samplings, self.positions.tolist(), self.histories())
        result = empty_result()
        result.token_ids = output.token_ids.tolist()
        result.invalid_samples = (~output.valid).nonzero().flatten().tolist()
        result.logprobs = {
            index: logprob_rows(row, [1], [self.samplings[index].num_logprobs or 0])[0]
            for index, row in enumerate(output.logprobs)
            if row is not None
        }
        return result

    def ranked_on_device(self, counts: list[int]) -> StepResult:
        ranker = CandidateRanker(self.columns, self.operations.sampling)
        logits, result = self.device_logits(), empty_result()
        with self._waiting():
            self.upload.begin()
            packed = ranker.pack(self.upload, self.seats, self.positions, self.logit_rows, np.array(counts))
            assert packed is not None
            self.upload.send()
            fetched = ranker.launch(logits, packed, self.tokens).fetch()
        self._wait()
        fetched.fill_result(result)
        return result

    def ranked_on_host(self, counts: list[int]) -> StepResult:
        rows = self.logits[torch.from_numpy(self.logit_rows)]
        result = empty_result()
        result.candidates = rank_candidates(rows, counts, self.samplings, self.positions.tolist(), self.histories())
        return result

    def _sampler(self) -> Sampler:
        return Sampler(self.columns, self.operations.sampling)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Within it, torch refuses to wait for the device, unless that is allowed."""
        if self.may_wait:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _wait(self) -> None:
        done = DeviceEvent(self.device)
        done.record()
        done.synchronize()


def random_case(operations: Operations, seed: int, count: int, device: torch.device | None = None) -> SamplingCase:
    generator = random.Random(seed)
    vocab_size = generator.choice([1, 7, 101, 208])
    samplings = [random_sampling(generator, vocab_size) for _ in range(count)]
    return SamplingCase(operations, samplings, seed, vocab_size, device or torch.device("cpu"))


def empty_result() -> StepResult:
    return StepResult(epoch=1, step_id=1)


def assert_same_rows(found: LogprobRows, expected: LogprobRows) -> None:
    assert (found.ranks, found.num_top, found.top_token_ids) == (
        expected.ranks,
        expected.num_top,
        expected.top_token_ids,
    )
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, rtol=1e-6, atol=1e-6)


def assert_same_samples(found: StepResult, expected: StepResult) -> None:
    """Compare samples; those that are not valid need only be so in both."""
    assert found.token_ids == expected.token_ids
    assert list(found.invalid_samples) == list(expected.invalid_samples)
    assert found.logprobs.keys() == expected.logprobs.keys()
    for index in expected.logprobs.keys() - set(expected.invalid_samples):
        assert_same_rows(found.logprobs[index], expected.logprobs[index])


def assert_same_candidates(found: StepResult, expected: StepResult) -> None:
    for one, other in zip(found.candidates, expected.candidates, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-6, atol=1e-6)
        assert (one.rows is None) == (other.rows is None)
        if one.rows is not None and other.rows is not None:
            assert_same_rows(one.rows, other.rows)


def spoil(logits: Tensor, row: int, bad: float) -> Tensor:
    logits = logits.clone()
    logits[row, -1] = bad
    return logits
