"""Sampling and ranking for seats given one by one, by the worker's own sampler, with either bundle of operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from common.sampling_params import SequenceSampling
from common.step import Candidates, LogprobRows, StepResult
from kernels.native.native_kernels import native_kernels
from kernels.sampling.sampling_operations import REFERENCES, SamplingOperations
from tests.worker.reference_edits import TokenHistory
from worker_svc.sampling.candidates import CandidateRanker
from worker_svc.sampling.sampler import Sampler
from worker_svc.sampling.sampling_columns import SamplingColumns
from worker_svc.steps.step_upload import DirectUpload

BUNDLES = ("torch", "native")


@cache
def bundle_of(name: str) -> SamplingOperations:
    return REFERENCES if name == "torch" else native_kernels().sampling


@dataclass(frozen=True, slots=True)
class Samples:
    """One sample for each row of logits."""

    token_ids: Tensor  # int64 [S]; 0 where not valid
    valid: Tensor  # bool [S]
    logprobs: tuple[LogprobRows | None, ...]


class SeatSamplers:
    """Row i has seats[i]. Rows with the same one, and no tokens before them, share a place in the columns."""

    def __init__(
        self,
        bundle: str,
        seats: Sequence[SequenceSampling],
        positions: Sequence[int],
        histories: Sequence[TokenHistory | None],
        vocab_size: int,
    ) -> None:
        self._operations = bundle_of(bundle)
        self._positions = np.array(positions, dtype=np.int64)
        rows = enumerate(zip(seats, histories, strict=True))
        keys = [(id(seat), None if history is None else row) for row, (seat, history) in rows]
        row_of = {key: row for row, key in enumerate(keys)}  # any of those that share a place
        places = {key: place for place, key in enumerate(row_of)}
        self._seats = np.array([places[key] for key in keys])
        self._columns = SamplingColumns(len(places), vocab_size)
        self._tokens = torch.zeros((len(places), max([1, *positions])), dtype=torch.int32)
        for place, row in enumerate(row_of.values()):
            num_prompt_tokens, history = 0, histories[row]
            if history is not None:
                tokens, num_prompt_tokens = history_before(history, positions[row])
                self._tokens[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            self._columns.place(place, seats[row], num_prompt_tokens)
        self._rows = np.arange(len(seats))
        self._upload = DirectUpload(torch.device("cpu"))

    def sample(self, logits: Tensor) -> Samples:
        sampler, result = Sampler(self._columns, self._operations), StepResult(epoch=1, step_id=1)
        packed = sampler.pack(self._upload, self._seats, self._positions, self._rows)
        if packed is not None:
            sampler.launch(logits, packed, self._tokens).fetch().fill_result(result)
        valid = torch.ones(len(self._seats), dtype=torch.bool)
        valid[list(result.invalid_samples)] = False
        logprobs = tuple(result.logprobs.get(row) for row in range(len(self._seats)))
        return Samples(torch.tensor(result.token_ids, dtype=torch.int64), valid, logprobs)

    def rank(self, logits: Tensor, counts: Sequence[int]) -> list[Candidates]:
        ranker, result = CandidateRanker(self._columns, self._operations), StepResult(epoch=1, step_id=1)
        packed = ranker.pack(self._upload, self._seats, self._positions, self._rows, np.array(counts))
        if packed is not None:
            ranker.launch(logits, packed, self._tokens).fetch().fill_result(result)
        return result.candidates


def history_before(history: TokenHistory, position: int) -> tuple[list[int], int]:
    """Cut a history to `position` tokens, or repeat its first one before it; tokens, and how many are of the prompt."""
    tokens = torch.as_tensor(history.token_ids).tolist()[:position]
    missing = position - len(tokens)
    return [*tokens[:1] * missing, *tokens], history.num_prompt_tokens + missing


def sample_seats(
    bundle: str,
    logits: Tensor,
    seats: Sequence[SequenceSampling],
    positions: Sequence[int],
    histories: Sequence[TokenHistory | None],
) -> Samples:
    """Sample row i of `logits` as seats[i] says."""
    return SeatSamplers(bundle, seats, positions, histories, logits.shape[1]).sample(logits)
