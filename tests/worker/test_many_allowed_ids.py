"""Parameters at their bounds: 65,536 allowed ids for each of many samples cost little more than to copy them.

Costs are compared with a look of the interpreter at each id, on the same thread, whatever else the machine does.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from common.bounds import MOST_ALLOWED
from common.sampling_params import SequenceSampling
from common.step import SequenceState, Step
from common.step_codec import step_from_pb, step_to_pb
from kernels.sampling.logit_edits import TokenMasks, apply_edits, with_masks
from kernels.sampling.penalty_reference import penalise
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.prompt_checks import ModelLimits
from scheduler_svc.requests.params.request_params import settle
from worker_svc.sampling.edits import pack_edits
from worker_svc.sampling.sampling_columns import SamplingColumns
from worker_svc.steps.sampling_check import check_sampling
from worker_svc.steps.step_upload import DirectUpload

VOCAB_SIZE = 70_000
NUM_SAMPLES = 16
IDS = range(VOCAB_SIZE - MOST_ALLOWED, VOCAB_SIZE)
LIMITS = ModelLimits(
    vocab_size=VOCAB_SIZE, max_model_len=100, eos_token_ids=frozenset(), has_tokenizer=False, has_chat_template=False
)


@pytest.fixture
def samples() -> list[SequenceSampling]:
    request = pb.GenerateRequest(sampling=pb.SamplingParams(n=NUM_SAMPLES, allowed_token_ids=IDS))
    params = settle(request, LIMITS, draw_seed=lambda: 1, make_id=lambda: "r")
    return [params.sequence_sampling(1, index) for index in range(NUM_SAMPLES)]


def least_s(work: Callable[[], Any]) -> float:
    """Least processor time in seconds."""
    times = []
    for _ in range(5):
        began_s = time.thread_time()
        work()
        times.append(time.thread_time() - began_s)
    return min(times)


def one_look_s(samples: list[SequenceSampling]) -> float:
    lists: list[Any] = [tuple(each.allowed_token_ids or ()) for each in samples]
    return least_s(lambda: [token_id for ids in lists for token_id in ids])


def test_a_request_keeps_four_bytes_for_each_of_its_allowed_ids(samples: list[SequenceSampling]) -> None:
    """1,000 that waited had 2.6 MB each."""
    assert {id(each.allowed_token_ids) for each in samples} == {id(samples[0].allowed_token_ids)}
    assert sys.getsizeof(samples[0].allowed_token_ids) < 5 * MOST_ALLOWED


def test_a_step_with_many_allowed_ids_is_sent_and_checked_in_the_time_of_a_few(samples: list[SequenceSampling]) -> None:
    """One request with 128 samples held the scheduler up for 0.7 s; it was 22 looks."""
    states = [
        SequenceState(
            seat=i, position=0, block_table=[i], token_ids=[1], history=(), num_prompt_tokens=1, sampling=each
        )
        for i, each in enumerate(samples)
    ]
    step = Step(epoch=1, step_id=1, whole=states)

    def work() -> None:
        for state in step_from_pb(step_to_pb(step)).whole:
            check_sampling("whole", state.sampling, VOCAB_SIZE)

    assert step_from_pb(step_to_pb(step)).whole[-1].sampling == samples[-1]
    assert least_s(work) < 6 * one_look_s(samples)


def test_rows_with_many_allowed_ids_are_edited_in_the_time_of_a_few_looks_at_each(
    samples: list[SequenceSampling],
) -> None:
    """Every step of 128 such rows took 2.5 s longer, for whoever else was in it; it was 11 looks."""
    logits = torch.randn(NUM_SAMPLES, VOCAB_SIZE)
    columns = SamplingColumns(NUM_SAMPLES, VOCAB_SIZE)
    for seat, sampling in enumerate(samples):
        columns.place(seat, sampling, 1)
    seats, upload = np.arange(NUM_SAMPLES), DirectUpload(torch.device("cpu"))

    def edit_rows() -> Tensor:
        edited = logits.clone()
        edits = pack_edits(upload, columns, seats, seats + 1)
        assert edits is not None
        apply_edits(edited, edits, penalise, seats_of_no_history)
        return edited

    seats_of_no_history = torch.zeros((1, 1), dtype=torch.int32)
    edited = edit_rows()
    assert torch.equal(edited[:, IDS.start :], logits[:, IDS.start :])
    assert (edited[:, : IDS.start] == -torch.inf).all()
    took_s = least_s(edit_rows)
    assert took_s < 4 * one_look_s(samples)


class CountingUpload(DirectUpload):
    """Counts what is sent."""

    num_bytes = 0

    def add(self, values: npt.NDArray[np.generic]) -> Tensor:
        self.num_bytes += values.nbytes
        return super().add(values)


def test_a_step_sends_a_bit_for_each_token_where_many_ids_are_allowed(samples: list[SequenceSampling]) -> None:
    """Regression: 128 samples with as many ids as are taken sent 134 MB with each step."""
    columns, upload = SamplingColumns(NUM_SAMPLES, VOCAB_SIZE), CountingUpload(torch.device("cpu"))
    for seat, sampling in enumerate(samples):
        columns.place(seat, sampling, 1)
    seats = np.arange(NUM_SAMPLES)
    pack_edits(upload, columns, seats, seats + 1)
    assert upload.num_bytes < 1.1 * NUM_SAMPLES * VOCAB_SIZE / 8


@pytest.mark.parametrize("num_ids", [1, 9, 10, 11, 40, 1000])
def test_rows_are_the_same_however_their_allowed_ids_are_sent(num_ids: int) -> None:
    """Few as ids, many as bits, beside rows without any, and with masks of grammars."""
    vocab_size, num_rows = 1290, 5  # whole words and a part of one
    generator = np.random.default_rng(num_ids)
    columns, upload = SamplingColumns(num_rows, vocab_size), DirectUpload(torch.device("cpu"))
    allowed = {row: generator.choice(vocab_size, num_ids, replace=False) for row in (0, 2, 3)}
    for seat in range(num_rows):
        ids = allowed[seat].tolist() if seat in allowed else None
        bias = ((5, 1.5),) if seat != 4 else ()
        columns.place(seat, SequenceSampling(seed=1, allowed_token_ids=ids, logit_bias=bias), 1)
    bits = generator.random((1, vocab_size)) < 0.5
    words = np.packbits(np.pad(bits, ((0, 0), (0, -vocab_size % 32))), axis=1, bitorder="little").view(np.int32)
    seats = np.arange(num_rows)
    edits = with_masks(pack_edits(upload, columns, seats, seats + 1), TokenMasks(torch.tensor([4]), upload.add(words)))
    assert edits is not None
    logits = torch.randn(num_rows, vocab_size)
    expected = logits.clone()
    expected[:4, 5] += 1.5
    for row, kept in allowed.items():
        expected[row, np.setdiff1d(np.arange(vocab_size), kept)] = -torch.inf
    expected[4, ~torch.from_numpy(bits[0])] = -torch.inf
    apply_edits(logits, edits, penalise, torch.zeros((1, 1), dtype=torch.int32))
    assert torch.equal(logits, expected)
